"""demo: the example corpus, some questions, fused prefill beside full prefill."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from ragcache.cli.asking import source_line
from ragcache.cli.command import command
from ragcache.cli.documents import print_report
from ragcache.cli.opening import open_with_models
from ragcache.cli.options import ModelOptions, StoreOptions
from ragcache.cli.output import on_terminal, say, seconds_text
from ragcache.errors import ConfigError

if TYPE_CHECKING:
    from ragcache import Answer, RagCache, Sampling

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
QUESTIONS_SUFFIX = "_questions.jsonl"


class DemoQuestion(NamedTuple):
    """hops: passages that have to be read together to answer."""

    text: str
    answer: str
    hops: int


@dataclass(frozen=True)
class Comparison:
    """One question over one set of passages, read twice."""

    question: DemoQuestion
    fused: Answer
    full: Answer


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
    k: Annotated[int, typer.Option("--k", envvar="RAGCACHE_DEMO_K", help="Passages to read.", min=1)] = 5,
) -> None:
    """Ingest the example corpus, ask some questions, and compare fused with full prefill."""
    asked = choose(load_questions(questions or _beside(corpus)), count)
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
            found.append(DemoQuestion(str(entry["question"]), str(entry["answer"]), int(entry["hops"])))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}, line {number}: not a question with question, answer and hops") from error
    if not found:
        raise ConfigError(f"{path}: there are no questions in it")
    return found


def choose(questions: Sequence[DemoQuestion], count: int) -> list[DemoQuestion]:
    """The first `count` questions, single-hop and two-hop in turn as long as there are both."""
    single = [question for question in questions if question.hops == 1]
    several = [question for question in questions if question.hops > 1]
    pairs = min(len(single), len(several))
    in_turn = [question for pair in zip(single, several, strict=False) for question in pair]
    return [*in_turn, *single[pairs:], *several[pairs:]][:count]


def _warm_up(kb: RagCache, question: DemoQuestion, k: int) -> None:
    """The first forward pass of a process pays for start-up. Full prefill reads no block, so the cache stays cold."""
    kb.ask(question.text, k, method="full", sampling=_short())


def _ask_and_print(kb: RagCache, question: DemoQuestion, k: int) -> Comparison:
    """Read the same passages fused, then in full: the same prompt, id by id."""
    hits = kb.retrieve(question.text, k)
    fused = kb.ask(question.text, hits=hits, sampling=_short(), on_overflow="trim")
    full = kb.ask(question.text, hits=hits, sampling=_short(), on_overflow="trim", method="full")
    compared = Comparison(question, fused, full)
    _print_comparison(compared)
    return compared


def _short() -> Sampling:
    from ragcache import Sampling

    return Sampling(max_tokens=48)


def is_right(answer: str, expected: str) -> bool:
    """Equal up to white space, case and a final full stop."""
    return _plain(answer) == _plain(expected)


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".").rstrip()


def _print_comparison(compared: Comparison) -> None:
    question, fused, full = compared.question, compared.fused, compared.full
    say(f"\nQ ({question.hops} hop{'s' if question.hops > 1 else ''}): {question.text}")
    for answer in (fused, full):
        verdict = "right" if is_right(answer.text, question.answer) else f"expected: {question.answer}"
        say(f"  {answer.method:<11}{answer.text.strip()}  [{verdict}]  first token after {_ttft(answer)}")
    for source in fused.hits:
        say(f"    from {source_line(source)}")
    say(f"    {fused.usage.cached_tokens} of {fused.usage.prompt_tokens} prompt tokens were not computed again")


def _ttft(answer: Answer) -> str:
    return seconds_text(answer.timings.ttft_s)


def _print_summary(compared: Sequence[Comparison]) -> None:
    say()
    for name, answers in (("fused", [c.fused for c in compared]), ("full", [c.full for c in compared])):
        right = sum(is_right(a.text, c.question.answer) for a, c in zip(answers, compared, strict=True))
        median = statistics.median(answer.timings.ttft_s for answer in answers)
        say(
            f"{answers[0].method + ' (' + name + ')':<20} {right} of {len(answers)} right, "
            f"first token after {seconds_text(median)} (median, after retrieval)"
        )


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
