"""demo: the example corpus, some questions, fused prefill beside full prefill."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from ragcache.cli.ask import source_line
from ragcache.cli.flags import ModelOptions, StoreOptions, open_with_models
from ragcache.cli.ingest import print_report
from ragcache.cli.terminal import command, on_terminal, say, seconds_text
from ragcache.errors import ConfigError

if TYPE_CHECKING:
    from ragcache import Answer, Hit, RagCache, Sampling

# Links in a clone, files in a wheel.
EXAMPLES = (Path(__file__).resolve().parents[1] / "demo" / "corpus").resolve().parent
QUESTIONS_SUFFIX = "_questions.jsonl"
MAX_TOKENS = 48
REPEATS = 3


class DemoQuestion(NamedTuple):
    """hops: passages that have to be read together to answer. sources: ends of their files' paths, where known."""

    text: str
    answer: str
    hops: int
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """One question over one set of passages, read by two methods.

    fused_s, full_s: seconds to the first token, median of several askings; fused with its blocks in memory
    """

    question: DemoQuestion
    fused: Answer
    full: Answer
    fused_s: float
    full_s: float


@command
def demo(
    models: ModelOptions,
    store: Annotated[
        Path, typer.Option("--store", envvar="RAGCACHE_DEMO_STORE", help="Directory of the demo's own store.")
    ] = Path(".demo/kb"),
    corpus: Annotated[
        Path, typer.Option("--corpus", envvar="RAGCACHE_DEMO_CORPUS", help="Folder or file to read.")
    ] = EXAMPLES / "corpus",
    questions: Annotated[
        Path | None,
        typer.Option(
            "--questions",
            envvar="RAGCACHE_DEMO_QUESTIONS",
            help="JSON lines with question, answer and hops; CORPUS_questions.jsonl if not given.",
        ),
    ] = None,
    count: Annotated[int, typer.Option("--count", envvar="RAGCACHE_DEMO_COUNT", help="Questions to ask.", min=1)] = 6,
    k: Annotated[int, typer.Option("--k", envvar="RAGCACHE_DEMO_K", help="Passages to read.", min=1)] = 8,
) -> None:
    """Ingest the example corpus, ask some questions, and compare fused with full prefill."""
    asked = choose(load_questions(questions or _beside(corpus)), count)
    if corpus.is_relative_to(Path.cwd()):
        corpus = corpus.relative_to(Path.cwd())  # sources are shown by this path
    if not corpus.exists():
        raise ConfigError(f"{corpus}: there is no corpus here; run from a clone of the repository or give --corpus")
    options = StoreOptions(store)
    say(f"Reading {corpus} into {store} ...")
    with open_with_models(options, models, create=True) as kb:
        print_report(kb.ingest(corpus, progress=on_terminal()))
    # Opened again, as the next process would be: the first blocks come from disk.
    with open_with_models(options, models) as kb:
        _warm_up(kb, asked[0], k)
        compared = [_ask_and_print(kb, question, k) for question in asked]
    _print_summary(compared)
    _print_next(store)


def _beside(corpus: Path) -> Path:
    return corpus.with_name(corpus.stem + QUESTIONS_SUFFIX)


def load_questions(path: Path) -> list[DemoQuestion]:
    """Raises ConfigError naming the file, or the line that is no question."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: the questions cannot be read ({error}); run from a clone of the repository or give --questions"
        ) from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            question, answer, hops = str(entry["question"]), str(entry["answer"]), int(entry["hops"])
            sources = tuple(str(source) for source in entry.get("sources", ()))
            found.append(DemoQuestion(question, answer, hops, sources))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}, line {number}: not a question with question, answer and hops") from error
    if not found:
        raise ConfigError(f"{path}: there are no questions in it")
    return found


def choose(questions: Sequence[DemoQuestion], count: int) -> list[DemoQuestion]:
    """`count` questions from all over the list, single-hop and two-hop alternating while there are both."""
    single = _spread([question for question in questions if question.hops == 1], count)
    several = _spread([question for question in questions if question.hops > 1], count)
    pairs = min(len(single), len(several))
    in_turn = [question for pair in zip(single, several, strict=False) for question in pair]
    return [*in_turn, *single[pairs:], *several[pairs:]][:count]


def _spread(questions: Sequence[DemoQuestion], count: int) -> list[DemoQuestion]:
    """Take at most `count` questions at even distances: neighbours in the list often ask about the same entity."""
    step = max(1, len(questions) // count)
    return list(questions[::step][:count])


def _warm_up(kb: RagCache, question: DemoQuestion, k: int) -> None:
    """The first forward pass of a process pays for start-up. Full prefill reads no block, so the cache stays cold."""
    kb.ask(question.text, k, method="full", sampling=_sampling(1), on_overflow="trim")


def _ask_and_print(kb: RagCache, question: DemoQuestion, k: int) -> Comparison:
    """Read the same passages fused, then in full: the same prompt, id by id."""
    hits = kb.retrieve(question.text, k)
    say(f"\nQ ({question.hops} hop{'s' if question.hops > 1 else ''}): {question.text}")
    fused = _ask(kb, question, hits, None)
    full = _ask(kb, question, hits, "full")
    again = [[_ask(kb, question, hits, method, max_tokens=1) for _ in range(REPEATS)] for method in (None, "full")]
    fused_s, full_s = (statistics.median(answer.timings.ttft_s for answer in answers) for answers in again)
    compared = Comparison(question, fused, full, fused_s, full_s)
    _print_comparison(compared)
    return compared


def _ask(
    kb: RagCache, question: DemoQuestion, hits: Sequence[Hit], method: str | None, max_tokens: int = MAX_TOKENS
) -> Answer:
    every_token = {"reuse": False} if method == "full" else None
    return kb.ask(
        question.text,
        hits=hits,
        sampling=_sampling(max_tokens),
        on_overflow="trim",
        method=method,
        method_options=every_token,
    )


def _sampling(max_tokens: int) -> Sampling:
    from ragcache import Sampling

    return Sampling(max_tokens)


def missing_sources(question: DemoQuestion, answer: Answer) -> list[str]:
    """Sources that the question needs and retrieval did not find: no method can make up for these."""
    found = [hit.chunk.document_id for hit in answer.hits]
    return [
        source for source in question.sources if not any(source.endswith(id) or id.endswith(source) for id in found)
    ]


def is_right(answer: str, expected: str) -> bool:
    """Equal up to white space, case and a final full stop."""
    return _plain(answer) == _plain(expected)


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".").rstrip()


def _print_comparison(compared: Comparison) -> None:
    question, fused, full = compared.question, compared.fused, compared.full
    for answer, again_s in ((fused, compared.fused_s), (full, compared.full_s)):
        verdict = "right" if is_right(answer.text, question.answer) else f"expected: {question.answer}"
        if missing := missing_sources(question, answer):
            verdict += f"; not among the {len(answer.hits)} passages: {', '.join(missing)}"
        say(f"  {answer.method:<11}{answer.text.strip()}  [{verdict}]")
        first_s = answer.timings.ttft_s
        say(f"  {'':<11}first token after {seconds_text(first_s)}, asked again after {seconds_text(again_s)}")
    for source in fused.hits:
        say(f"    from {source_line(source)}")
    say(f"    {fused.usage.cached_tokens} of {fused.usage.prompt_tokens} prompt tokens were not computed again")


def _print_summary(compared: Sequence[Comparison]) -> None:
    say()
    fused_s = statistics.median(one.fused_s for one in compared)
    full_s = statistics.median(one.full_s for one in compared)
    for seconds, answers in ((fused_s, [one.fused for one in compared]), (full_s, [one.full for one in compared])):
        right = sum(is_right(a.text, one.question.answer) for a, one in zip(answers, compared, strict=True))
        score = f"{right} of {len(answers)} right"
        say(f"{answers[0].method:<11}{score}, first token after {seconds_text(seconds)} (median)")
    say(f"Fused prefill takes {fused_s / full_s:.2f} x the time of full prefill, retrieval left out of both.")


def _print_next(store: Path) -> None:
    say(
        f"""
What to try next:
  ragcache chat --store {store}                 ask your own questions
  ragcache ask "..." --store {store} --json     the same for programs
  ragcache info --store {store}                 what the store holds
  ragcache ingest YOUR_FOLDER --store kb        your own documents
(the command is in .venv/bin when scripts/demo made the environment)"""
    )
