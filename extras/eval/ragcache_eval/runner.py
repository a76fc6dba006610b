"""Every method over every question: answers, distances from full prefill, costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from ragcache.engine.contract import EmbeddedModel
from ragcache.errors import ContextTooLongError, check_choice, check_least
from ragcache.fusion.fuse import FuseOutput
from ragcache.fusion.method import FusionMethod
from ragcache.kv.block_key import digest
from ragcache.models.card import eos_token_ids
from ragcache.models.language_model import LanguageModel
from ragcache.prompt import Prompt, PromptFormat, encode_text
from ragcache_eval.case import Case
from ragcache_eval.journal import Key, Ledger, Score
from ragcache_eval.methods import FULL, MethodSpec
from ragcache_eval.metrics import contains_answer, exact_match, token_f1
from ragcache_eval.reading import PromptReader, WrittenAnswer, forced_logits, write_answer

NO_PASSAGES = "no passages"


@dataclass(frozen=True)
class RunSettings:
    """How answers are written and compared.

    max_tokens:  longest answer; stop: strings that end it
    on_overflow: if a prompt does not fit the model: raise an "error", or "skip" the question with a score that says so
    reference:   the answer along which distances are taken: "gold", or full prefill's if a question has no gold answer;
                 or always full prefill's ("full")
    """

    max_tokens: int = 32
    stop: tuple[str, ...] = ()
    on_overflow: str = "error"
    reference: str = "gold"

    def __post_init__(self) -> None:
        check_least("max_tokens", self.max_tokens, 1)
        check_choice("on_overflow", self.on_overflow, ("error", "skip"))
        check_choice("reference", self.reference, ("gold", "full"))


class Reference(NamedTuple):
    """Full prefill's answer, and its logits along `ids`, float32 [len(ids), vocab_size]."""

    written: WrittenAnswer
    ids: list[int]
    logits: Tensor
    score: Score


class Runner:
    """Measures methods on a model."""

    def __init__(self, lm: LanguageModel | EmbeddedModel, form: PromptFormat, settings: RunSettings) -> None:
        self.lm = lm
        self.form = form
        self.settings = settings

    def fits(self, prompt: Prompt) -> bool:
        """Return whether the model has room for the prompt and the longest answer."""
        return prompt.num_tokens + self.settings.max_tokens <= self.lm.max_positions

    def describe(self) -> dict[str, Any]:
        """Return everything that results depend on besides cases and methods, as the journal's settings."""
        return {
            "fingerprint": self.lm.fingerprint,
            "prefix": digest(list(self.form.prefix_ids)),
            "question_format": self.form.suffix_text("{question}"),
            **asdict(self.settings),
        }

    def run(self, cases: Sequence[Case], specs: Sequence[MethodSpec], journal: Ledger) -> Iterator[Score]:
        """Yield scores of all cases: for each the no-passages baseline, then the methods in order. Scores in the
        journal are not measured again.

        Raises ContextTooLongError under on_overflow "error", and a method's own error if this model cannot run it.
        """
        methods = [(spec, spec.method()) for spec in specs]
        for case in cases:
            mark = case_digest(case)
            keys = [Key(case.id, mark, name) for name in (NO_PASSAGES, *(spec.key for spec in specs))]
            if not all(key in journal.done for key in keys):
                for score in self._measure(case, mark, methods, journal.done):
                    if score.key not in journal.done:
                        journal.add(score)
            yield from (journal.done[key] for key in keys)

    def _measure(
        self, case: Case, mark: str, methods: Sequence[tuple[MethodSpec, FusionMethod]], done: Any
    ) -> Iterator[Score]:
        """Yield the scores that `done` lacks; full prefill is always read, because the others are compared with it."""
        names = (NO_PASSAGES, *(spec.key for spec, _ in methods))
        blank = {name: Score(case.id, mark, name, case.cluster, dict(case.cell)) for name in names}
        reader = self.reader(case)
        prompt = reader.prompt
        if not self.fits(prompt):
            wanted = prompt.num_tokens + self.settings.max_tokens
            reason = f"{case.id}: prompt and answer take {wanted} tokens and {self.lm.name} {self.lm.max_positions}"
            if self.settings.on_overflow == "error":
                raise ContextTooLongError(f"{reason}; give it fewer passages, or skip such questions")
            yield from (_skipped(score, reason) for score in blank.values())
            return
        reference: Reference | None = None
        if blank[NO_PASSAGES].key not in done:
            yield self._without_passages(case, blank[NO_PASSAGES])
        for spec, method in methods:
            if reference is None:
                reference = self._reference(case, reader, blank[spec.key], method)
                yield reference.score
            elif blank[spec.key].key not in done:
                yield self._score(case, reader, spec, method, reference, blank[spec.key])

    def reader(self, case: Case) -> PromptReader:
        """Return a reader of the case's prompt, with room for the answer."""
        return PromptReader.of(self.lm, case, self.form, self.settings.max_tokens + 1)

    def _without_passages(self, case: Case, blank: Score) -> Score:
        """Score full prefill of the question alone: the model's knowledge without passages."""
        prompt = case.prompt_without_passages(self.lm.tokenizer, self.form)
        reader = PromptReader(self.lm, prompt, self.settings.max_tokens + 1)
        fused, _ = reader.read(MethodSpec(FULL, FULL).method())
        written = write_answer(self.lm, fused, self.settings.max_tokens, self.settings.stop)
        score = replace(blank, **_costs(fused, 0.0), **answer_scores(written.text, case))
        fused.cache.release()
        return score

    def _reference(self, case: Case, reader: PromptReader, blank: Score, full: FusionMethod) -> Reference:
        fused, _ = reader.read(full)
        written = write_answer(self.lm, fused, self.settings.max_tokens, self.settings.stop)
        ids = self._reference_ids(case, written)
        logits = forced_logits(self.lm, fused, ids)
        same = distance(logits, logits)
        score = replace(blank, same_answer=True, **same, **_costs(fused, 0.0), **answer_scores(written.text, case))
        fused.cache.release()
        return Reference(written, ids, logits, score)

    def _reference_ids(self, case: Case, written: WrittenAnswer) -> list[int]:
        """Return the reference answer as it would follow the prompt; the end of text if full prefill wrote nothing."""
        if not case.answers or self.settings.reference == "full":
            return list(written.ids) or list(eos_token_ids(self.lm)[:1]) or [0]
        space = "" if not self.form.tail or self.form.tail[-1].isspace() else " "
        return encode_text(self.lm.tokenizer, f"{space}{case.answers[0]}")[: self.settings.max_tokens]

    def _score(
        self,
        case: Case,
        reader: PromptReader,
        spec: MethodSpec,
        method: FusionMethod,
        reference: Reference,
        blank: Score,
    ) -> Score:
        try:
            fused, encode_s = reader.read(method, spec.recipe, spec.kept, spec.neighbours, spec.primer)
        except ContextTooLongError as error:
            if self.settings.on_overflow == "error":
                raise
            return _skipped(blank, str(error))
        written = write_answer(self.lm, fused, self.settings.max_tokens, self.settings.stop)
        distances = distance(reference.logits, forced_logits(self.lm, fused, reference.ids))
        score = replace(
            blank,
            same_answer=written.text == reference.written.text,
            **distances,
            **_costs(fused, encode_s),
            **answer_scores(written.text, case),
        )
        fused.cache.release()
        return score


def case_digest(case: Case) -> str:
    """Return 16 hex digits that name the case's content."""
    passages = [list(p) for p in case.passages]
    # False: a setting that is no longer there; without it, existing journals would be measured again.
    return digest([case.question, passages, list(case.answers), False])[:16]


def answer_scores(prediction: str, case: Case) -> dict[str, Any]:
    """Return the scores that compare texts; none if the case has no gold answer."""
    text = prediction.strip()
    if not case.answers:
        return {"prediction": text}
    accuracy = contains_answer(text, case.answers)
    return {
        "prediction": text,
        "accuracy": accuracy,
        "exact_match": exact_match(text, case.answers),
        "f1": token_f1(text, case.answers),
    }


def distance(reference: Tensor, other: Tensor) -> dict[str, Any]:
    """Return divergence and agreement of full prefill's and a method's logits, both [answer_tokens, vocab_size]."""
    kl = kl_divergence(reference, other)
    agrees = top1_agrees(reference, other)
    return {
        "kl_first": float(kl[0]),
        "kl_answer": float(kl.mean()),
        "top1_first": bool(agrees[0]),
        "top1_answer": float(agrees.double().mean()),
    }


def kl_divergence(reference: Tensor, other: Tensor) -> Tensor:
    """Return KL(reference || other) in nats as float64 [...]. Both are logits [..., vocab_size]."""
    p = reference.double().log_softmax(-1)
    q = other.double().log_softmax(-1)
    # Where p has no mass at all, exp(p) * (p - q) is 0 * inf.
    return (p.exp() * (p - q)).where(p.exp() > 0, 0.0).sum(-1).clamp_min(0.0)


def top1_agrees(reference: Tensor, other: Tensor) -> Tensor:
    """Return, as bool [...], whether both would choose the same token."""
    return reference.argmax(-1) == other.argmax(-1)


def _costs(fused: FuseOutput, encode_s: float) -> dict[str, Any]:
    tokens, layers = fused.prompt_tokens - fused.added_tokens, len(fused.computed_tokens)
    return {
        "prompt_tokens": tokens,
        "kept_share": sum(fused.kept_tokens) / layers / tokens,
        "computed_share": sum(fused.computed_tokens) / layers / tokens,
        "encode_s": encode_s,
        "place_s": fused.timings.place_s,
        "prefill_s": fused.timings.prefill_s,
        "ttft_s": fused.timings.place_s + fused.timings.prefill_s,
    }


def _skipped(score: Score, reason: str) -> Score:
    return replace(score, skipped=reason)
