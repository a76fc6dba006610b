"""`ragcache demo`: ask about the example corpus or a folder, by the default method and by full prefill."""

from __future__ import annotations

import json
import re
import statistics
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

import ragcache
from ragcache.cli.ask import source_line
from ragcache.cli.flags import ModelOptions, StoreOptions, hide_bars_in_pipes, open_with_models, option
from ragcache.cli.ingest import print_report
from ragcache.cli.terminal import command, on_terminal, say, say_note, seconds_text
from ragcache.errors import ConfigError, ModelError, StoreError
from ragcache.models.hub import BUNDLED

if TYPE_CHECKING:
    from ragcache import Answer, Hit, RagCache

# ragcache/demo/corpus is a link to examples/corpus in a clone, and a folder of files in a wheel.
EXAMPLES = (Path(ragcache.__file__).resolve().parent / "demo" / "corpus").resolve().parent
GUIDES = [EXAMPLES.parent / "docs" / page for page in ("tutorial.md", "scale.md", "compare.md")]
"""Pages that the real model reads in a clone: their passages have some hundred tokens, the corpus's only a line."""
ABOUT_GUIDES = ("What is a passage?", "What is kept in PostgreSQL?", "What does llama.cpp reuse?")
QUESTIONS_SUFFIX = "_questions.jsonl"
REAL, TOY = "smollm2", "mini"
MAX_TOKENS = 48
REPEATS, SLOW_S = 3, 1.0
MOST_TITLES = 1000


class DemoQuestion(NamedTuple):
    """A question of the demo. answer: "" if unknown. hops: passages that have to be read together to answer. sources:
    ends of their files' paths, if known.
    """

    text: str
    answer: str
    hops: int
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """A question over a set of passages, read by two methods.

    fused: by the default method, which may also be full prefill
    fused_s, full_s: seconds to the first token, median of several runs; fused with its KV in memory
    is_exact: whether an answer must match the expected answer word by word to be right, as answers of a model trained
        on the corpus do
    """

    question: DemoQuestion
    fused: Answer
    full: Answer
    fused_s: float
    full_s: float
    is_exact: bool

    def is_right(self, answer: Answer) -> bool:
        judge = is_right if self.is_exact else holds_last_word
        return judge(answer.text, self.question.answer)


# Environment variables such as RAGCACHE_STORE are ignored: the demo must not write into a store of the user's.
_own = partial(option, environment=False)


@command
def demo(
    models: ModelOptions,
    folder: Annotated[
        Path | None, typer.Argument(help="Folder or file to read in place of the example corpus.", metavar="[FOLDER]")
    ] = None,
    store: Annotated[
        Path | None, _own("--store", "The demo's own store; in .demo, one for each model and folder, if not given.")
    ] = None,
    corpus: Annotated[Path, _own("--corpus", "The same as FOLDER.")] = EXAMPLES / "corpus",
    questions: Annotated[
        Path | None,
        _own(
            "--questions",
            "JSON lines with question, answer and hops; CORPUS_questions.jsonl if not given, or else the documents' "
            "titles are asked about.",
        ),
    ] = None,
    count: Annotated[int, _own("--count", "Questions to ask.", min=1)] = 6,
    k: Annotated[int, _own("--k", "Passages to read.", min=1)] = 8,
) -> None:
    """Ingest the example corpus or a folder, ask some questions, and compare the default method with full prefill.

    For the example corpus, mini answers first: the bundled model, trained for reuse and on that corpus. Then smollm2
    answers, a small real model that is downloaded once; in a clone it reads pages of the documentation. A folder is
    read by smollm2 alone, or by mini if smollm2 cannot be downloaded.
    """
    corpus = folder or corpus
    both = models.model is None and store is None and corpus == EXAMPLES / "corpus"
    known = questions or (_beside(corpus) if folder is None or _beside(corpus).exists() else None)
    asked = choose(load_questions(known), count) if known else []
    corpus = _relative(corpus)  # sources are shown by this path
    if not corpus.exists():
        raise ConfigError(f"{corpus}: there is no corpus here; run from a clone of the repository or give --corpus")
    read = [corpus]
    if both:
        _compare(replace(models, model=TOY), read, _own_store(TOY, None), asked, count, k)
        say(f"\nThe same with {REAL}, a small model that was not trained for reuse:\n")
    model = models.model or (REAL if _has_real() else TOY)
    if both and model == REAL and questions is None and all(page.is_file() for page in GUIDES):
        read, asked = GUIDES, [DemoQuestion(text, "", 1) for text in ABOUT_GUIDES[:count]]
    store = store or (Path(".demo") / "kb-guides" if read is GUIDES else _own_store(model, folder))
    if not (both and model == TOY):
        if model == TOY and models.model is None:
            say(f"Going on with {TOY}, which knows the example corpus and nothing else.")
        _compare(replace(models, model=model), read, store, asked, count, k)
    _print_next(store)


def _compare(
    models: ModelOptions, read: Sequence[Path], store: Path, asked: Sequence[DemoQuestion], count: int, k: int
) -> None:
    """Ingest the files to read, and ask a model the questions by its default method and by full prefill."""
    options = StoreOptions(store=store)
    say(f"Reading {', '.join(str(_relative(path)) for path in read)} into {store} with {models.model} ...")
    with open_with_models(options, models, create=True) as kb:
        print_report(kb.ingest(read, progress=on_terminal()))
        asked = asked or _about_titles(kb, count)
    # The store is opened again, as a later process would open it, so that the first blocks come from disk.
    with open_with_models(options, models) as kb:
        _warm_up(kb, asked[0], k)
        compared = [_ask_and_print(kb, question, k) for question in asked]
    _print_summary(compared)


def _relative(path: Path) -> Path:
    """Return the path as seen from the current directory, if it is below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _has_real() -> bool:
    """Return whether the real model is here or could be fetched; print the reason if not."""
    from ragcache.models.pull import pull

    hide_bars_in_pipes()
    try:
        pull(REAL, say_note)
    except (ModelError, StoreError, ConfigError) as error:
        say(f"{error}.")
        return False
    return True


def _own_store(model: str, folder: Path | None) -> Path:
    """Return the store's path: a store belongs to a model, and the demo's also to a folder."""
    name = "kb" if model == TOY else f"kb-{Path(model).name}"
    if folder is not None:
        name += f"-{zlib.crc32(str(folder.resolve()).encode('utf-8', 'surrogateescape')):08x}"
    return Path(".demo") / name


def _about_titles(kb: RagCache, count: int) -> list[DemoQuestion]:
    """Return questions about documents from all over the store. Raises ConfigError if it has none."""
    found = kb.documents(limit=MOST_TITLES)
    titles = list(dict.fromkeys(one.title.strip() or Path(one.source or one.id).stem for one in found))
    if not titles:
        raise ConfigError("no document could be read here, so there is nothing to ask; name another folder")
    return _spread([DemoQuestion(f"What is said about {title}?", "", 1) for title in titles], count)


def _beside(corpus: Path) -> Path:
    return corpus.with_name(corpus.stem + QUESTIONS_SUFFIX)


def load_questions(path: Path) -> list[DemoQuestion]:
    """Return the questions of a file. Raises ConfigError naming the file, or the line that is not a question."""
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
    """Return `count` questions from all over the list, single-hop and two-hop alternating while there are both."""
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
    """Run a first forward pass, so that no measurement includes start-up. It reads and keeps no block."""
    _ask(kb, question, kb.retrieve(question.text, k), "full", max_tokens=1)


def _ask_and_print(kb: RagCache, question: DemoQuestion, k: int) -> Comparison:
    """Answer a question by the default method and by full prefill, print both answers, and return their comparison.

    Both methods read the same passages, and the same prompt token by token.
    """
    hits = kb.retrieve(question.text, k)
    say(f"\nQ ({question.hops} hop{'s' if question.hops > 1 else ''}): {question.text}")
    fused = _ask(kb, question, hits, None)
    full = _ask(kb, question, hits, "full")
    times = REPEATS if full.timings.ttft_s < SLOW_S else 1
    again = [[_ask(kb, question, hits, method, max_tokens=1) for _ in range(times)] for method in (None, "full")]
    fused_s, full_s = (statistics.median(answer.timings.ttft_s for answer in answers) for answers in again)
    compared = Comparison(question, fused, full, fused_s, full_s, kb.lm.name in BUNDLED)
    _print_comparison(compared)
    return compared


def _ask(
    kb: RagCache, question: DemoQuestion, hits: Sequence[Hit], method: str | None, max_tokens: int = MAX_TOKENS
) -> Answer:
    from ragcache import Sampling

    return kb.ask(
        question.text,
        hits=hits,
        sampling=Sampling(max_tokens, stop=("\n",)),
        on_overflow="trim",
        method=method,
        method_options={"reuse": False} if method == "full" else None,
    )


def missing_sources(question: DemoQuestion, answer: Answer) -> list[str]:
    """Return the sources that the question needs and retrieval did not find: no method can make up for these."""
    found = [hit.chunk.document_id for hit in answer.hits]
    return [
        source for source in question.sources if not any(source.endswith(id) or id.endswith(source) for id in found)
    ]


def is_right(answer: str, expected: str) -> bool:
    """Return whether the answer equals the expected answer up to white space, case and a final full stop."""
    return _plain(answer) == _plain(expected)


def holds_last_word(answer: str, expected: str) -> bool:
    """Return whether this answer contains the last word of the expected answer, which is the requested value."""
    words = _plain(expected).split()
    return bool(words) and re.search(rf"(?<!\w){re.escape(words[-1])}(?!\w)", _plain(answer)) is not None


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".").rstrip()


def _print_comparison(compared: Comparison) -> None:
    fused, full = compared.fused, compared.full
    for answer, again_s in ((fused, compared.fused_s), (full, compared.full_s)):
        say(f"  {answer.method:<22}{answer.text.strip()}{_verdict(compared, answer)}")
        first_s = answer.timings.ttft_s
        say(f"  {'':<22}first token after {seconds_text(first_s)}, asked again after {seconds_text(again_s)}")
    for hit in fused.to_json()["hits"]:
        say(f"    from {source_line(hit)}")
    say(f"    {fused.usage.cached_tokens} of {fused.usage.prompt_tokens} prompt tokens came from the cache")


def _verdict(compared: Comparison, answer: Answer) -> str:
    question = compared.question
    if not question.answer:
        return ""
    verdict = "right" if compared.is_right(answer) else f"expected: {question.answer}"
    if missing := missing_sources(question, answer):
        verdict += f"; not among the {len(answer.hits)} passages: {', '.join(missing)}"
    return f"  [{verdict}]"


def _print_summary(compared: Sequence[Comparison]) -> None:
    say()
    fused_s = statistics.median(one.fused_s for one in compared)
    full_s = statistics.median(one.full_s for one in compared)
    known = [one for one in compared if one.question.answer]
    for who, seconds, right in (
        ("ragcache", fused_s, sum(one.is_right(one.fused) for one in known)),
        ("full", full_s, sum(one.is_right(one.full) for one in known)),
    ):
        score = f"{right} of {len(known)} right, " if known else ""
        say(f"{who:<11}{score}first token after {seconds_text(seconds)} (median, asked again)")
    same = sum(_plain(one.fused.text) == _plain(one.full.text) for one in compared)
    chosen = ", ".join(f"{name} for {times}" for name, times in Counter(one.fused.method for one in compared).items())
    say(f"ragcache read by {chosen}; {same} of {len(compared)} answers are word by word those of full prefill.")
    if known and not known[0].is_exact:
        say("An answer counts as right that holds the last word of the expected one.")
    say(f"ragcache takes {fused_s / full_s:.2f} x the time of full prefill, retrieval left out of both.")


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
