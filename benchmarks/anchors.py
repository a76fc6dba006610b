"""KVLink's compressed caches (table 3): anchors against LLMLingua-2 at one share of KV, with and without link tokens.

python -m benchmarks.anchors --trained "anchors, K=5=DIR" --trained "anchors, K=0=DIR" --classifier DIR

Single- and two-hop questions over 8 short passages of the registry, names and wordings held out. DIR: what `ragcache
train --anchors` and `python -m tools.mini.compressor` left (docs/training.md has the commands). LLMLingua-2 leaves
words out of what the bundled model reads, and, as in the paper, of what models read that were trained on such passages
(`python -m tools.compress_rows`): --trained-compressed "LLMLingua-2, K=5=DIR". AnLLM is anchors by another mask, which
`ragcache train --anchors N --text-sees-anchors` makes: --trained "AnLLM, K=5=DIR".
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch

import ragcache as rc
from benchmarks.environment import environment
from benchmarks.options import add_numbers, add_places
from benchmarks.report import Goal, Result, show, write
from ragcache.fusion import get_method
from ragcache.prompt import prompt_format
from ragcache_eval.case import Case
from ragcache_eval.intervals import Estimate, estimate
from ragcache_eval.metrics import exact_match
from ragcache_eval.reading import PromptReader, write_answer
from ragcache_eval.registry import MAX_ANSWER_TOKENS, RegistrySettings, registry_cases
from ragcache_papers.llmlingua2 import Compressor

HOPS = (1, 2)


@dataclass(frozen=True)
class Settings:
    """questions: of each number of hops; keep: share of the words that LLMLingua-2 leaves"""

    questions: int = 200
    seed: int = 1
    passages: int = 8
    keep: float = 0.5
    trained: tuple[str, ...] = ()
    trained_compressed: tuple[str, ...] = ()
    classifier: str = ""


class Way(NamedTuple):
    """A row: a model, and how its passages are shortened before it reads them."""

    label: str
    model: str
    compressor: Compressor | None = None

    def shortened(self, case: Case) -> Case:
        if self.compressor is None:
            return case
        return replace(case, passages=tuple(p._replace(text=self.compressor.compress(p.text)) for p in case.passages))


class Answers(NamedTuple):
    """right: by hops, by question; kept: tokens of KV for a token of the whole passages"""

    right: dict[int, list[bool]]
    kept: float


def read(way: Way, method: str | None, settings: Settings) -> Answers:
    """The answers of a method; None: the model's own."""
    lm = rc.load_lm(way.model)
    form, chosen = prompt_format(lm.tokenizer), get_method(method or lm.default_method)
    right, held, whole = dict[int, list[bool]](), 0.0, 0
    for hops in HOPS:
        right[hops] = []
        for case in registry_cases(
            RegistrySettings(hops=hops, passages=(settings.passages,), questions=settings.questions, seed=settings.seed)
        ):
            reader = PromptReader.of(lm, way.shortened(case), form, MAX_ANSWER_TOKENS + 1)
            fused, _ = reader.read(chosen)
            right[hops].append(exact_match(write_answer(lm, fused, MAX_ANSWER_TOKENS).text, case.answers))
            text = case.prompt_without_passages(lm.tokenizer, form).num_tokens
            held += fmean(fused.kept_tokens) - text
            whole += sum(map(len, case.prompt(lm.tokenizer, form).chunk_ids))
            fused.cache.release()
    return Answers(right, held / whole)


def ways(settings: Settings) -> Iterator[tuple[Way, str | None]]:
    yield Way("full prefill", "mini"), "full"
    yield Way("all KV", "mini"), None
    for one in settings.trained:
        label, _, directory = one.rpartition("=")
        yield Way(label, directory), None
    if settings.classifier:
        compressor = Compressor(settings.classifier, settings.keep)
        for one in settings.trained_compressed:
            label, _, directory = one.rpartition("=")
            yield Way(label, directory, compressor), None
        yield Way(f"LLMLingua-2, {settings.keep:g}", "mini", compressor), None


def difference(of: Answers, over: Answers) -> Estimate:
    """In the share of right answers, question by question."""
    pairs = [(a, b) for hops in HOPS for a, b in zip(of.right[hops], over.right[hops], strict=True)]
    return estimate([float(a) - float(b) for a, b in pairs])


def goals(found: dict[str, Answers]) -> list[Goal]:
    """The order of the paper's table: what was trained in the order given, LLMLingua-2 over an untrained model last."""
    order = [label for label in found if label not in ("full prefill", "all KV")]
    return [
        Goal(f"right answers, {better} less {worse}", "at least", 0.0, mean, True, None, low, high)
        for better, worse in pairwise(order)
        for mean, low, high, _ in [difference(found[better], found[worse])]
    ]


def rows(found: dict[str, Answers]) -> list[dict[str, object]]:
    return [
        {
            "label": label,
            "kept_share": answers.kept,
            **{f"{hops}hop": estimate(answers.right[hops])._asdict() for hops in HOPS},
        }
        for label, answers in found.items()
    ]


def markdown(table: Sequence[dict[str, object]]) -> list[str]:
    lines = ["| | KV kept | single-hop | two-hop |", "|---|---|---|---|"]
    for row in table:
        cells = (Estimate(**row[f"{hops}hop"]) for hops in HOPS)  # type: ignore[arg-type]
        text = " | ".join(f"{one.mean:.3f} ({one.low:.3f} to {one.high:.3f})" for one in cells)
        lines.append(f"| {row['label']} | {row['kept_share']:.2f} | {text} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_numbers(parser, Settings(), ("questions", "seed", "passages"))
    parser.add_argument("--keep", type=float, default=Settings.keep)
    parser.add_argument("--trained", action="append", default=[], metavar="LABEL=DIR")
    parser.add_argument("--trained-compressed", action="append", default=[], metavar="LABEL=DIR")
    parser.add_argument("--classifier", default="", metavar="DIR")
    parser.add_argument("--name", default="anchors", help="of the files in --out")
    add_places(parser, None)
    given = parser.parse_args(arguments)
    if given.trained_compressed and not given.classifier:
        parser.error("--trained-compressed reads passages that --classifier shortens; name that too")
    trained, compressed = tuple(given.trained), tuple(given.trained_compressed)
    settings = Settings(given.questions, given.seed, given.passages, given.keep, trained, compressed, given.classifier)
    about = environment("benchmarks.anchors", sys.argv[1:] if arguments is None else arguments, torch.device("cpu"))
    found = {way.label: read(way, method, settings) for way, method in ways(settings)}
    table = rows(found)
    result = Result(given.name, asdict(settings), about, {}, {}, {"rows": table}, goals(found))
    show(result)
    print("\n".join(markdown(table)))
    path = write(result, Path(given.out))
    path.with_suffix(".md").write_text("\n".join(markdown(table)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
