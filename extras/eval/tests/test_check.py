"""The check finds a broken method, which is then not chosen."""

import json
from copy import copy
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

import ragcache as rc
from ragcache.engine.verdict import save_verdict
from ragcache.errors import ConfigError
from ragcache.fusion import METHODS
from ragcache.fusion.method import FusionMethod, PrefillOutput, PrefillRequest
from ragcache.fusion.reposition import Reposition
from ragcache.kv.block_key import Recipe
from ragcache.models.primer import bound_primer
from ragcache.prompt import prompt_format
from ragcache_demo.bag_of_words import BagOfWords
from ragcache_eval.case import Case, CasePassage
from ragcache_eval.check import Check
from ragcache_eval.check_command import _print_verdict
from ragcache_eval.intervals import Estimate
from ragcache_eval.methods import MethodSpec, all_methods, shipped_primers
from ragcache_eval.reading import PromptReader
from ragcache_eval.report import Row
from ragcache_eval.runner import Runner, RunSettings
from ragcache_eval.store_cases import asked_of, made_from, neighbours_of, opened
from ragcache_eval.thresholds import Thresholds

TEXTS = {
    "cats": "The cat of the baker sat on the old mat by the door. It was happy there.\n",
    "dogs": "Dogs bark at night in the small town of Kelbrook on the hill.\n",
    "rivers": "The river Arno rises in the Vale hills and flows into the lake.\n",
}
CASE = Case("a", "Where did the cat sit?", tuple(map(CasePassage, TEXTS.values())), ())
LIMITS = Thresholds(min_agreement=0.9, max_kl=0.5, min_same_answer=0.0)


@dataclass(frozen=True)
class Broken(Reposition):
    """A method that loses the chunks' content: their values become zero."""

    name: ClassVar[str] = "broken"

    def prefill(self, request: PrefillRequest) -> PrefillOutput:
        empty = [replace(block, values=block.values * 0) for block in request.blocks]
        return super().prefill(replace(request, blocks=empty))


@dataclass(frozen=True)
class Exact(FusionMethod):
    """Full prefill under another name: a method that must pass."""

    name: ClassVar[str] = "exact"
    paper: ClassVar[str] = ""
    summary: ClassVar[str] = ""

    def prefill(self, request: PrefillRequest) -> PrefillOutput:
        return super().prefill(replace(request, layout=replace(request.layout, separate=False), blocks=(), exact=None))


@pytest.fixture
def extra(monkeypatch) -> None:
    monkeypatch.setitem(METHODS, "broken", Broken)
    monkeypatch.setitem(METHODS, "exact", Exact)


@pytest.fixture
def runner(tiny) -> Runner:
    return Runner(tiny, prompt_format(tiny.tokenizer), RunSettings(max_tokens=6, on_overflow="skip"))


@pytest.fixture
def store(tiny, tmp_path):
    alone = rc.StoreConfig(neighbours=0)
    with rc.RagCache.open(tmp_path / "kb", model=tiny, embedder=BagOfWords(), store=alone) as kb:
        kb.ingest(rc.Document(name, text) for name, text in TEXTS.items())
    return tmp_path / "kb"


def run(runner: Runner, cases: list[Case], names: tuple[str, ...], limits: Thresholds = LIMITS):
    return judged(Check(runner, "tests", cases, [MethodSpec(name, name) for name in ("full", *names)], limits))


def judged(check: Check):
    list(check.scores())
    return check.finish().verdict


def test_a_broken_method_fails_and_auto_does_not_take_it(extra, runner, store, tiny, caplog):
    with opened(store) as found:
        cases = made_from(found, questions=4, passages=3, lm=tiny)
    verdict = run(runner, cases, ("broken", "exact"))
    broken, exact = verdict.methods
    assert (broken.safe, exact.safe) == (False, True)
    assert "below 0.9" in broken.reason or "above 0.5" in broken.reason
    assert broken.computed_share < exact.computed_share  # it would be cheaper
    assert exact.figures["kl_answer"] == 0.0
    save_verdict(store, verdict)
    with rc.RagCache.open(store, model=tiny, embedder=BagOfWords(), method="auto") as kb:
        assert kb.ask("Where do dogs bark?").method == "exact"
        assert not caplog.records
        kb.ask("Where do dogs bark?", method="broken")
    assert "'broken' failed the check" in caplog.records[-1].getMessage()


def test_shipped_primers_are_tried_and_stay_out_of_the_choice(runner, store, tiny, capsys):
    with opened(store) as found:
        cases = made_from(found, questions=3, passages=3, lm=tiny)
    specs = [*(MethodSpec(name, name) for name in ("full", "reposition")), *shipped_primers()]
    verdict = judged(Check(runner, "tests", cases, specs, Thresholds(0, 99, 0, 1)))
    alone, *behind = verdict.methods
    assert [one.primer for one in behind] == ["64", "128", "256"]
    assert "give one of half of them" in behind.pop().reason  # longer than half of the context here
    for found in behind:
        far = [distance(runner, case, found.primer) for case in cases]
        assert found.figures["kl_first"] == pytest.approx(sum(far) / len(far), rel=1e-3)
    nearest = min((alone, *behind), key=lambda one: one.figures["kl_answer"])
    assert verdict.best_primer == (None if nearest is alone else (alone, nearest))
    assert verdict.best() is alone  # safe by these limits; the other methods need blocks that the store lacks
    at = [replace(one, figures={**one.figures, "kl_answer": kl}) for one, kl in ((alone, 0.4), (behind[0], 0.1))]
    _print_verdict(replace(verdict, methods=at), None)
    said = " ".join(capsys.readouterr().out.split())
    assert "reposition:primer=64" in said
    assert "the primer of 64 tokens, KL 0.100 instead of 0.400" in said
    assert "reencode NEW --store OLD --recipe primer --primer 64" in said


def distance(runner, case, primer) -> float:
    """KL from full prefill of the first token, where passages are read behind the primer."""
    prompt = case.prompt(runner.lm.tokenizer, runner.form)
    own = rc.fuse(runner.lm, prompt, "reposition", recipe=Recipe("primer", primer=primer))
    logits = (one.next_logits.log_softmax(-1) for one in (own, rc.fuse(runner.lm, prompt, "full")))
    return float(torch.nn.functional.kl_div(*logits, log_target=True, reduction="sum"))


PARTS = [
    "The cat of the baker sat on the old mat by the door of the mill.",
    "It was happy there until the dogs of the town came by at night.",
    "Then it ran up the hill and into the house of the old miller.",
]


def test_a_store_with_a_primer_is_judged_behind_it(runner, tmp_path, tiny, caplog):
    options = {"model": tiny, "embedder": BagOfWords(), "method": "auto"}
    with rc.RagCache.open(tmp_path / "kb", recipe=Recipe("primer", primer="Soil is old."), **options) as kb:
        kb.ingest(rc.Document(name, text) for name, text in TEXTS.items())
    with opened(tmp_path / "kb") as found:
        cases, primer = made_from(found, questions=2, passages=3, lm=tiny), bound_primer(found.documents.properties())
    assert primer == tiny.recipe(Recipe("primer", primer="Soil is old.")).primer_ids != ()
    check = Check(
        runner, "tests", cases, [MethodSpec(name, name) for name in ("full", "reposition")], LIMITS, 0, primer
    )
    scores = [score for score in check.scores() if score.case == cases[0].id]
    assert scores[-1].kl_first == pytest.approx(distance(runner, cases[0], primer), rel=1e-3)
    verdict = check.finish().verdict
    (found,) = verdict.methods
    assert (found.recipe, tuple(verdict.primer)) == ("primer", primer)
    save_verdict(tmp_path / "kb", replace(verdict, methods=(replace(found, safe=True),)))
    with rc.RagCache.open(tmp_path / "kb", **options) as kb:
        assert kb.ask("Where do dogs bark?").method == "reposition"
    assert not caplog.records
    save_verdict(tmp_path / "kb", replace(verdict, primer=()))
    with rc.RagCache.open(tmp_path / "kb", **options) as kb:
        assert kb.ask("Where do dogs bark?").method == "cacheblend(ratio=0.3)"
    assert (
        f"a primer of 0 tokens each, and the store's are read behind 0 others and a primer of {len(primer)} tokens"
        in (caplog.records[0].getMessage())
    )


@pytest.mark.parametrize(
    ("chosen_from", "count"), [("document", 2), pytest.param("similarity", 1, marks=pytest.mark.slow)]
)
def test_a_store_is_judged_as_its_passages_are_read(extra, runner, tmp_path, tiny, caplog, chosen_from, count):
    """Passages are encoded after their neighbours, and the verdict is used for such stores only."""
    options = {"model": tiny, "embedder": BagOfWords(), "chunker": rc.ChunkerConfig(max_tokens=70, min_tokens=1)}
    config = rc.StoreConfig(neighbours=count, neighbours_from=chosen_from)
    with rc.RagCache.open(tmp_path / "kb", store=config, **options) as kb:
        kb.ingest(rc.Document("cat", "\n\n".join(PARTS) + "\n"))
        chunks = kb.chunks_of("cat")
        names, near = kb._parts.block_keys, kb._parts.block_keys.with_neighbours(chunks)
    assert [chunk.text.strip() for chunk in chunks] == PARTS
    with opened(tmp_path / "kb") as found:
        assert neighbours_of(found) == (count, chosen_from)
        cases = made_from(found, questions=4, passages=3, lm=tiny)
    by_text = {chunk.text: [list(ids) for ids in chunk.neighbours] for chunk in near}
    for passage in cases[0].passages:
        assert passage.behind_ids(tiny.tokenizer) == by_text[passage.text]
    assert any(by_text.values())
    specs = [MethodSpec(name, name) for name in ("full", "exact", "reposition", "concat")]
    verdict = judged(Check(runner, "tests", cases, specs, LIMITS, count))
    by_name = {one.name: one for one in verdict.methods}
    assert "cannot run: method 'concat' leaves blocks at the positions" in by_name["concat"].reason
    reader = PromptReader(tiny, cases[0].prompt(tiny.tokenizer, runner.form), 1)
    blocks = tiny.encode(
        reader.prompt.chunk_ids, names.recipe, neighbours=[by_text[one.text] for one in cases[0].passages]
    )
    own, _ = runner.reader(cases[0]).read(Reposition(), neighbours=count)
    assert torch.equal(own.next_logits, rc.fuse(tiny, reader.prompt, "reposition", blocks).next_logits)
    save_verdict(tmp_path / "kb", verdict)
    with rc.RagCache.open(tmp_path / "kb", method="auto", **options) as kb:
        assert kb.ask("Where did the cat sit?").method == verdict.best().name != "full"
        assert kb.ask("Where did the cat sit?", method="auto").method == verdict.best().name
    assert not caplog.records
    save_verdict(tmp_path / "kb", replace(verdict, neighbours=0))
    with rc.RagCache.open(tmp_path / "kb", method="auto", **options) as kb:
        assert kb.ask("Where did the cat sit?").method == "epic"
    assert (
        f"read behind 0 others and a primer of 0 tokens each, and the store's are read behind {count}"
        in caplog.records[0].getMessage()
    )


def test_without_a_safe_method_auto_reads_whole_prompts(extra, runner, store, tiny):
    with opened(store) as found:
        save_verdict(store, run(runner, made_from(found, questions=2, passages=3, lm=tiny), ("broken",)))
    with rc.RagCache.open(store, model=tiny, embedder=BagOfWords(), method="auto") as kb:
        assert kb.ask("Where do dogs bark?").method == "full"


def test_distances_are_taken_along_the_answer_of_full_prefill(runner):
    """A gold answer counts for accuracy alone."""
    with_gold = run(runner, [replace(CASE, answers=("nothing like it",))], ("reposition",)).methods[0]
    without = run(runner, [CASE], ("reposition",)).methods[0]
    assert with_gold.figures["kl_answer"] == pytest.approx(without.figures["kl_answer"])
    assert with_gold.figures["accuracy"] == 0.0
    assert "accuracy" not in without.figures


def test_thresholds_decide(runner):
    strict = run(runner, [CASE], ("reposition",), Thresholds(1.0, 0.0, 1.0))
    loose = run(runner, [CASE], ("reposition",), Thresholds(0.0, 1e9, 0.0))
    assert strict.methods[0].figures["kl_answer"] == loose.methods[0].figures["kl_answer"]
    assert not strict.methods[0].safe
    assert loose.methods[0].safe
    assert loose.thresholds["max_kl"] == 1e9
    with pytest.raises(ConfigError, match="min-agreement is 1"):
        Thresholds(min_agreement=1.5)


@pytest.mark.parametrize(
    ("whole", "found", "safe"), [(0.5, 0.486, True), (0.5, 0.48, False), (0.0, 0.0, True), (0.9, 1, True)]
)
def test_a_loss_of_accuracy_is_a_share_of_full_prefills(whole, found, safe):
    """0.02 of 0.5 is a loss of 4 %, and 3 % may be lost."""

    def row(accuracy: float) -> Row:
        exact = {"top1_answer": 1.0, "same_answer": 1.0, "kl_answer": 0.0, "accuracy": accuracy}
        return Row("m", {}, 100, 0, "", {name: Estimate(mean, 0.0, 1.0, 100) for name, mean in exact.items()}, {})

    broken = Thresholds().broken_by(row(found), row(whole))
    assert broken == ("" if safe else "loss of accuracy 0.040 is above 0.03")


def test_methods_that_cannot_run_are_said_to_be_so(runner):
    verdict = judged(Check(runner, "tests", [CASE], all_methods(), LIMITS))
    by_name = {found.name: found for found in verdict.methods}
    assert set(by_name) == set(METHODS) - {"full"}
    assert "cannot run" in by_name["link"].reason
    assert not by_name["link"].safe
    assert "cannot run" not in by_name["reposition"].reason


@pytest.mark.parametrize("spec", ["reposition:kept=0.5", "reposition:neighbours=1"])
def test_a_verdict_is_about_methods_over_whole_kv_that_was_read_alone(runner, spec):
    with pytest.raises(ConfigError, match=r"a verdict is about .*; leave \w+ out"):
        Check(runner, "test", [], [MethodSpec.parse(spec)], LIMITS)


def test_nothing_that_fits_is_an_error(runner):
    long = Case("long", "Q?", (CasePassage("word " * 800),), ())
    with pytest.raises(ConfigError, match="no question could be measured: long"):
        run(runner, [long], ("reposition",))


@pytest.fixture
def kv_alone(tiny, tmp_path):
    """Return the path of a store that holds KV and no documents."""
    alone = rc.StoreConfig(neighbours=0)
    with rc.RagCache.open(tmp_path / "alone", model=tiny, embedder=BagOfWords(), store=alone) as kb:
        kb.precompute([rc.Document(name, text) for name, text in TEXTS.items()], collection="theirs")
    return tmp_path / "alone"


def test_a_store_of_kv_alone_is_judged_by_its_passages(extra, runner, kv_alone, tiny, caplog):
    """The command that the warning advises works on such a store, and its verdict is used."""
    with opened(kv_alone) as found:
        cases = made_from(found, questions=3, passages=3, lm=tiny)
    assert {one.text.strip() for case in cases for one in case.passages} == {text.strip() for text in TEXTS.values()}
    reader = PromptReader(tiny, cases[0].prompt(tiny.tokenizer, runner.form), 1)
    with rc.RagCache.open(kv_alone, model=tiny, embedder=BagOfWords()) as kb:
        made = {tuple(kb._parts.whole.encode([text])[0]) for text in TEXTS.values()}
        assert set(map(tuple, reader.prompt.chunk_ids)) == made
    save_verdict(kv_alone, run(runner, cases, ("broken", "exact")))
    with rc.RagCache.open(kv_alone, model=tiny, embedder=BagOfWords(), method="auto") as kb:
        assert kb.complete([rc.Passage(TEXTS["dogs"]), "Where do dogs bark?"]).method == "exact"
    assert not caplog.records


@pytest.mark.parametrize("held", ["store", "kv_alone"])
def test_questions_read_what_is_retrieved_and_over_kv_alone_what_is_nearest_by_words(
    held, request, tiny, tmp_path, monkeypatch
):
    monkeypatch.setattr("ragcache.engine.assemble.open_embedder", lambda *given: BagOfWords())
    file = tmp_path / "q.jsonl"
    rows = [{"question": "Where do dogs bark?"}, {"question": "Own?", "passages": ["Own text."], "answer": "yes"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with opened(request.getfixturevalue(held)) as found:
        first, second = asked_of(found, file, passages=2, lm=tiny)
    assert first.passages[0].text == TEXTS["dogs"]
    assert len(first.passages) == 2
    assert [p.text for p in second.passages] == ["Own text."]


def test_an_empty_store_says_what_to_give(tiny, kv_alone, tmp_path):
    with rc.RagCache.open(tmp_path / "empty", model=tiny, embedder=BagOfWords()):
        pass
    with opened(tmp_path / "empty") as found, pytest.raises(ConfigError, match=r"ingest or precompute some.*--data"):
        made_from(found, questions=1, passages=2, lm=tiny)
    other = copy(tiny)
    other.fingerprint = "another"
    with opened(kv_alone) as found, pytest.raises(ConfigError, match=r"tokens of .* leave --model out"):
        made_from(found, questions=1, passages=2, lm=other)
