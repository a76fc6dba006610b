"""A3's figures 2 and 3: which tokens methods run again, and how far the question's attention then is from the truth.

python -m benchmarks.attention --model smollm2 --data DIR
python -m benchmarks.attention --model smollm2 --data DIR --sets hotpotqa --questions 8 --journal FILE

The truth is full prefill of the same prompt, by the same weights. **Hit rate** (figure 2): of the passages' tokens that
the question attends to most there, summed over its tokens, all heads and the layers shown, the share that a method runs
again. **Distance** (figure 3): L2 distance of a row of attention over the passages' tokens from full prefill's, mean
over the question's tokens and the heads, in a shallow, two middle and a deep layer. A question is all that stands
behind the passages, the chat template's tail included.

Questions are chosen as `benchmarks.answers` chooses them; every method reads a question before the next is asked, and
what was found is on disk before the next method reads: the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import ragcache as rc
from benchmarks.answers import in_turn, parse_questions, questions_of, short_answers
from benchmarks.environment import environment
from benchmarks.lines import Lines
from benchmarks.report import Result, write
from ragcache.errors import ConfigError
from ragcache.fusion.fuse import FuseOutput
from ragcache.models.attention import Attended, observing
from ragcache.prompt import Prompt
from ragcache_eval.intervals import Estimate, estimate
from ragcache_eval.methods import MethodSpec, parse_methods
from ragcache_eval.reading import PromptReader
from ragcache_eval.runner import Runner, RunSettings, case_digest

SETS = ("hotpotqa", "musique", "xquad_en:passages=6")
METHODS = "reposition,cacheblend:ratio=0.15,epic,a3:ratio=0.15,a3:ratio=0.15:boundary_tokens=16,prophet:ratio=0.15"
PAPER_LAYERS, PAPER_DEPTH = (4, 13, 22, 31), 32
TOP = 0.05
"""Share of the passages' tokens that counts as attended to most."""


class Seen(NamedTuple):
    """maps: by layer, the question's attention over the passages: float32 [heads, question tokens, passage tokens]

    again: bool [passage tokens]: those that ran in the last layer shown
    """

    maps: dict[int, Tensor]
    again: Tensor


@dataclass(eq=False)
class Watch:
    """Looks at some layers of the pass that reads the question; of several passes the last one counts."""

    prompt: Prompt
    layers: Sequence[int]
    maps: dict[int, Tensor] = field(default_factory=dict)
    positions: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def __call__(self, attended: Attended) -> None:
        if attended.layer not in self.layers or int(attended.positions.max()) < self.prompt.num_tokens - 1:
            return
        weights = attended.weights(len(self.prompt.suffix_ids)).flatten(0, 1)
        passages = slice(len(self.prompt.prefix_ids), self.prompt.context_tokens)
        self.maps[attended.layer] = weights[:, :, passages].clone()
        self.positions = attended.positions

    def seen(self) -> Seen:
        again = torch.zeros(self.prompt.num_tokens, dtype=torch.bool)
        again[self.positions.cpu()] = True
        return Seen(self.maps, again[len(self.prompt.prefix_ids) : self.prompt.context_tokens])


def look(reader: PromptReader, spec: MethodSpec, layers: Sequence[int]) -> Seen:
    watch = Watch(reader.prompt, layers)
    fused: FuseOutput
    with observing(watch):
        fused, _ = reader.read(spec.method(), spec.recipe)
    fused.cache.release()
    return watch.seen()


def most_attended(truth: Seen) -> Tensor:
    """bool [passage tokens]"""
    total = torch.stack([one.sum((0, 1)) for one in truth.maps.values()]).sum(0)
    count = max(1, round(TOP * total.shape[0]))
    return torch.zeros_like(total, dtype=torch.bool).index_fill_(0, total.topk(count).indices, True)


def figures_of(found: Seen, truth: Seen) -> dict[str, Any]:
    """What a method did to one question."""
    top = most_attended(truth)
    distances = {
        str(layer): float((found.maps[layer] - truth.maps[layer]).square().sum(2).sqrt().mean()) for layer in truth.maps
    }
    return {
        "again": float(found.again.float().mean()),
        "hit_rate": float(found.again[top].float().mean()),
        "distance": distances,
    }


def layers_of(lm: rc.LanguageModel) -> list[int]:
    """The paper's layers of 32, at the same depths."""
    depth = lm.shape.num_layers
    return sorted({min(depth - 1, round(layer * depth / PAPER_DEPTH)) for layer in PAPER_LAYERS})


def measure(runner: Runner, questions: dict[str, list[Any]], specs: Sequence[MethodSpec], journal: Lines) -> None:
    layers = layers_of(runner.lm)
    for case in in_turn(questions):
        keys = {spec.key: f"{case.id}/{case_digest(case)} by {spec.key}" for spec in specs}
        if all(key in journal.done for key in keys.values()):
            continue
        reader = runner.reader(case)
        truth = look(reader, specs[0], layers)
        for spec in specs[1:]:
            if keys[spec.key] not in journal.done:
                journal.add(keys[spec.key], figures_of(look(reader, spec, layers), truth))
        journal.add(keys[specs[0].key], figures_of(truth, truth))
        print(case.id, file=sys.stderr, flush=True)


class Row(NamedTuple):
    """A method over all questions; distance: by layer."""

    method: str
    again: Estimate
    hit_rate: Estimate
    distance: dict[str, Estimate]


def rows_of(journal: Lines, specs: Sequence[MethodSpec]) -> list[Row]:
    """Rows over the questions that every method has read."""
    by_method = {spec.key: dict[str, Any]() for spec in specs}
    for key, value in journal.done.items():
        question, _, method = key.partition(" by ")
        if method in by_method:
            by_method[method][question] = value
    asked = sorted(set.intersection(*(set(found) for found in by_method.values())))
    if not asked:
        raise ConfigError("no question was read by every method; ask for --questions 1 or more")
    rows = []
    for spec in specs:
        own = [by_method[spec.key][name] for name in asked]
        distance = {layer: estimate([one["distance"][layer] for one in own]) for layer in own[0]["distance"]}
        again, hits = (estimate([one[name] for one in own]) for name in ("again", "hit_rate"))
        rows.append(Row(spec.label, again, hits, distance))
    return rows


def markdown(rows: Sequence[Row]) -> list[str]:
    layers = list(rows[0].distance)
    heads = ["method", "run again", "hit rate", *(f"distance, layer {layer}" for layer in layers)]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        cells = [row.hit_rate, *(row.distance[layer] for layer in layers)]
        text = " | ".join(f"{one.mean:.3f} [{one.low:.3f}, {one.high:.3f}]" for one in cells)
        lines.append(f"| `{row.method}` | {row.again.mean:.3f} | {text} |")
    return [*lines, "", f"{rows[0].hit_rate.size} questions that every method read."]


def parse(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "benchmarks.attention", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    return parse_questions(parser, given, "attention", SETS, questions=8, methods=METHODS)


def main(arguments: Sequence[str] | None = None) -> Result:
    given = sys.argv[1:] if arguments is None else arguments
    options = parse(given)
    about = environment("benchmarks.attention", given, torch.device("cpu"))
    lm = rc.load_lm(options.model)
    specs = parse_methods(options.methods or [METHODS])
    runner = Runner(lm, short_answers(lm), RunSettings(max_tokens=1, on_overflow="skip", reference="full"))
    questions = questions_of(options.sets, options.data, runner, options.context, options.questions, options.seed)
    model = Path(lm.name).name
    name = options.name or f"attention-{model}"
    settings = {"model": model, "context": options.context, "seed": options.seed, "top": TOP, **runner.describe()}
    journal = Lines(options.journal or options.out / f"{name}.journal.jsonl", settings)
    measure(runner, questions, specs, journal)
    rows = rows_of(journal, specs)
    figures = {"rows": [plain(row) for row in rows]}
    asked = {"sets": options.sets, "questions": options.questions}
    result = Result(name, {**settings, **asked}, about, {}, {}, figures, ())
    page = markdown(rows)
    write(result, options.out).with_suffix(".md").write_text("\n".join(page) + "\n", encoding="utf-8")
    print("\n".join(page))
    return result


def plain(row: Row) -> dict[str, Any]:
    distance = {layer: one._asdict() for layer, one in row.distance.items()}
    return {
        "method": row.method,
        "again": row.again._asdict(),
        "hit_rate": row.hit_rate._asdict(),
        "distance": distance,
    }


if __name__ == "__main__":
    main()
