"""What each codec saves and what it costs: sizes, rates, fidelity on the bundled model, time to first token.

python -m benchmarks.codecs --rounds 0       # sizes, rates, fidelity on held-out questions, with KVzip too
python -m benchmarks.codecs --questions 0    # times to first token over 10 passages of 500 tokens; other file
python -m benchmarks.codecs --rounds 0 --codec mikv    # one codec beside raw; a file of its own

Sizes are against the same block in bfloat16: normal numbers of published shapes, which are the worst case of an
entropy coder, and the bundled model's own KV of joined passages. Fidelity is against the same prompt read over raw
blocks that hold all KV, in the regime of `benchmarks.quality`. Rates are of one thread over bytes in bfloat16;
decoding is into place, layer by layer. A codec that needs a basis has one of other passages for the bundled model, and
a stand-in without structure elsewhere.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

import ragcache as rc
from benchmarks.environment import environment
from benchmarks.files import drop_page_cache, file_system, read_blocks
from benchmarks.quality_units import Cell, answers, cases_of
from benchmarks.reading import random_prompt
from benchmarks.report import RESULTS, Goal, Result, show, write
from benchmarks.shapes import SHAPES, build
from benchmarks.timing import Variant, alternate, ratio, summarise
from ragcache.codecs import CODECS, Bases, Codec, get_codec
from ragcache.engine.loader import BlockLoader
from ragcache.fusion import get_method
from ragcache.fusion.fuse import block_recipe
from ragcache.ingest.encoder import ModelEncoder
from ragcache.kv.block import KVBlock
from ragcache.prompt import prompt_format
from ragcache.store.kv_store import KVStore
from ragcache_eval.registry import MAX_ANSWER_TOKENS
from ragcache_papers.kvtc_basis import fit_basis, stand_in

LOSSY = [name for name, codec in CODECS.items() if not codec.lossless]
PLACES = ("memory tier", "cold disk")
QUESTIONS = ("single", "two-hop")  # those that moved blocks answer
PASSAGES = 8
# Codecs that are tried with KVzip as well, and the shares of KV that it leaves them.
PRUNED = {"raw": (0.2, 0.1), "cachegen": (0.2, 0.1, 0.08), "kvtc": (0.5, 0.25)}
SAMPLE_QUESTIONS = 30  # whose passages, of other names and wordings, make the basis of a codec that needs one
SIZES = {"int8": 0.52, "int4": 0.29, "cachegen": 0.22, "kvtc": 1 / 12}
AGREEMENT = {"int8": 0.995, "int4": 0.98, "cachegen": 0.97, "kvtc": 0.99}
# By way of storing: bytes of bfloat16's, and right answers of raw's.
PRUNED_GOALS = {
    "raw, kept 0.2": (1 / 4, 0.98),
    "kvtc, kept 0.5": (1 / 30, 0.97),
    "kvtc, kept 0.25": (1 / 30, 0.97),
    "cachegen, kept 0.08": (1 / 30, 0.97),
}
STATED_QUESTIONS = 300
SIZED_SHAPES = ("SmolLM2-135M", "Llama-3.1-8B")
SIZED_TOKENS = (256, 300, 500)


def lossy(names: Iterable[str]) -> list[str]:
    return [name for name in names if name != "raw"]


@dataclass
class Fidelity:
    """Over all questions: share with raw's first token, KL(raw || codec) at it in nats, right answers, bytes of the
    blocks and of what they are in bfloat16."""

    questions: int = 0
    agreed: int = 0
    kl_sum: float = 0.0
    kl_max: float = 0.0
    right: int = 0
    stored_bytes: int = 0
    whole_bytes: int = 0

    def add(self, raw: torch.Tensor, logits: torch.Tensor, right: bool, stored_bytes: int, whole_bytes: int) -> None:
        ours, theirs = logits.double().log_softmax(-1), raw.double().log_softmax(-1)
        kl = max(0.0, float((theirs.exp() * (theirs - ours)).sum()))
        self.questions += 1
        self.agreed += int(raw.argmax() == logits.argmax())
        self.kl_sum += kl
        self.kl_max = max(self.kl_max, kl)
        self.right += int(right)
        self.stored_bytes += stored_bytes
        self.whole_bytes += whole_bytes

    def to_json(self) -> dict[str, float]:
        return {
            "questions": self.questions,
            "top1_agreement": self.agreed / self.questions,
            "kl_mean": self.kl_sum / self.questions,
            "kl_max": self.kl_max,
            "exact_match": self.right / self.questions,
            "bytes_of_bfloat16": self.stored_bytes / self.whole_bytes,
        }


class Stored(NamedTuple):
    """A codec, and the share of KV that KVzip leaves it."""

    codec: Codec
    kept: float = 1.0

    @property
    def label(self) -> str:
        return self.codec.name if self.kept == 1 else f"{self.codec.name}, kept {self.kept:g}"


def ways(
    lm: rc.LanguageModel, codecs: dict[str, Codec], seed: int, shares: Sequence[float] | None = None
) -> list[Stored]:
    """All codecs over all KV, raw first; then some over what KVzip leaves: `shares`, or those of PRUNED."""
    chosen = {name: own if shares is None else shares for name, own in PRUNED.items() if name in codecs}
    pruned = ((name, kept) for name, own in chosen.items() for kept in own)
    return [
        *(Stored(codec) for codec in codecs.values()),
        *(Stored(trained(lm, name, seed, kept), kept) for name, kept in pruned),
    ]


def trained(lm: rc.LanguageModel, name: str, seed: int, kept: float = 1.0) -> Codec:
    """The codec; where it needs a basis, one of passages, kept alike, that no question here is about."""
    bases = Bases()
    codec = get_codec(name, bases)
    if codec.needs_basis:
        recipe, form = block_recipe(lm, get_method(lm.default_method)), prompt_format(lm.tokenizer)
        cases = cases_of(Cell(QUESTIONS[0], PASSAGES), SAMPLE_QUESTIONS, seed + 1)
        prompts = [case.prompt(lm.tokenizer, form) for case in cases]
        recipe = replace(recipe, kept=kept)
        bases.add(fit_basis([one for p in prompts for one in lm.encode(p.chunk_ids, recipe, p.prefix_ids)]))
    return codec


def fidelity(lm: rc.LanguageModel, questions: int, seed: int, tried: Sequence[Stored]) -> dict[str, Fidelity]:
    """By way of storing. Every one reads the same prompts, by the model's own method."""
    method, form = get_method(lm.default_method), prompt_format(lm.tokenizer)
    recipe = block_recipe(lm, method)
    found = {way.label: Fidelity() for way in tried}
    for kind in QUESTIONS:
        for number, case in enumerate(cases_of(Cell(kind, PASSAGES), questions, seed), 1):
            prompt = case.prompt(lm.tokenizer, form)
            blocks = {
                kept: lm.encode(prompt.chunk_ids, replace(recipe, kept=kept), prompt.prefix_ids)
                for kept in sorted({way.kept for way in tried})
            }
            whole = sum(block.num_bytes for block in blocks[1.0]) * 2 // lm.dtype.itemsize
            raw = None
            for codec, kept in tried:  # raw comes first
                coded = [codec.decode(codec.encode(block)) for block in blocks[kept]]
                used = replace(recipe, kept=kept)
                fused = rc.fuse(lm, prompt, method, coded, recipe=used, reserve_tokens=MAX_ANSWER_TOKENS)
                raw = fused.next_logits.clone() if raw is None else raw
                stored = sum(block.num_bytes for block in coded)
                if codec.name == "raw":  # it keeps the model's dtype
                    stored = stored * 2 // lm.dtype.itemsize
                right = answers(lm, fused, case)
                found[Stored(codec, kept).label].add(raw, fused.next_logits, right, stored, whole)
                fused.cache.release()
            print(f"\r{kind}: {number} of {questions}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def normal_block(shape: str, num_tokens: int, dtype: torch.dtype, seed: int, layers: int | None = None) -> KVBlock:
    """Normal numbers in a published model's shape."""
    config = SHAPES[shape]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    size = (layers or config["num_hidden_layers"], config["num_key_value_heads"], num_tokens, head_dim)
    generator = torch.Generator().manual_seed(seed)
    return KVBlock(*(torch.randn(size, generator=generator).to(dtype) for _ in range(2)))


def sizes(lm: rc.LanguageModel, seed: int, codecs: dict[str, Codec]) -> dict[str, dict[str, float]]:
    """By codec and block: encoded bytes, the file's header left out, over the block's in bfloat16."""
    normal = {
        f"{shape}, {tokens} tokens": normal_block(shape, tokens, torch.bfloat16, seed, layers=6)
        for shape in SIZED_SHAPES
        for tokens in SIZED_TOKENS
    }
    case = cases_of(Cell(QUESTIONS[0], PASSAGES), 1, seed)[0]
    prompt = case.prompt(lm.tokenizer, prompt_format(lm.tokenizer))
    read: dict[str, KVBlock] = {}
    for tokens in SIZED_TOKENS:
        ids = [one for chunk in prompt.chunk_ids for one in chunk][:tokens]
        own = lm.encode([ids])[0]
        read[f"{lm.name}, {len(ids)} tokens"] = own.map(lambda tensor: tensor.bfloat16())
    measured = {}
    for name in lossy(codecs):
        pairs = [(what, block, codecs[name].for_trial(block)) for what, block in normal.items()]
        pairs += [(what, block, codecs[name]) for what, block in read.items()]
        measured[name] = {
            what: codec.decode(codec.encode(block)).num_bytes / block.num_bytes for what, block, codec in pairs
        }
    return measured


def rates(rounds: int, seed: int, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """MB/s of bytes in bfloat16, by codec; the best of all rounds, as others use the machine too."""
    block = normal_block("SmolLM2-135M", 500, torch.bfloat16, seed)
    out = torch.empty(block.keys.shape[1:], dtype=torch.bfloat16)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = {}
    for name in names:
        codec = get_codec(name).for_trial(block)
        tensors = codec.encode(block)
        decoded = codec.decode(tensors)

        def place(decoded: KVBlock = decoded) -> None:
            for layer in range(decoded.num_layers):
                decoded.copy_keys(layer, out)
                decoded.copy_values(layer, out)

        megabytes = block.num_bytes / 1e6
        found[name] = {
            "encode_mb_per_s": megabytes / min(_seconds(lambda codec=codec: codec.encode(block), rounds)),  # type: ignore[misc]
            "decode_mb_per_s": megabytes / min(_seconds(place, rounds)),
        }
    torch.set_num_threads(threads)
    return found


def _seconds(work: Callable[[], Any], rounds: int) -> list[float]:
    taken = []
    for _ in range(max(rounds, 5)):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return taken


class Reader:
    """Time to first token of one prompt over stores of one codec: blocks in the memory tier, and on a cold disk."""

    def __init__(self, lm: rc.LanguageModel, prompt: rc.Prompt, blocks: Sequence[KVBlock], codec: str, root: Path):
        self.lm, self.prompt, self.root, self.codec = lm, prompt, root, codec
        encoder = ModelEncoder(lm)
        self.keys = [encoder.key(ids) for ids in prompt.chunk_ids]
        self.budget = 4 * sum(block.num_bytes for block in blocks)
        self.basis: str | None = None
        with self._open() as store:
            if store.lacks_basis:
                self.basis = store.add_basis(stand_in(blocks[0]))
        self.store, self.cold = BlockLoader(self._open()), BlockLoader(self._open())
        for key, block in zip(self.keys, blocks, strict=True):
            self.store.kv.put(key, block)

    def _open(self) -> KVStore:
        return KVStore(self.root, memory_bytes=self.budget, codec=self.codec, basis=self.basis)

    def forget(self) -> None:
        self.cold.close()
        self.cold.kv.close()
        self.cold = BlockLoader(self._open())
        gc.collect()
        drop_page_cache(self.root)

    def memory(self) -> int:
        return self._first_token(self.store)

    def disk(self) -> int:
        return self._first_token(self.cold)

    def _first_token(self, loader: BlockLoader) -> int:
        blocks = [loaded.block for loaded in read_blocks(loader, self.keys) if loaded is not None]
        fused = rc.fuse(self.lm, self.prompt, "reposition", blocks, reserve_tokens=0)
        token = int(fused.next_logits.argmax())
        fused.cache.release()
        return token


def first_tokens(options: argparse.Namespace, root: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Timings and ratios to raw. Blocks hold normal numbers: speed does not depend on what was learnt."""
    lm = build(options.shape, "float32", seed=options.seed).lm
    prompt = random_prompt(lm.vocab_size, options.passages, options.tokens, 30, options.seed)
    blocks = [normal_block(options.shape, options.tokens, lm.dtype, seed) for seed in range(options.passages)]
    readers = {name: Reader(lm, prompt, blocks, name, root / name) for name in options.codecs}
    variants = [Variant(f"{name}: memory tier", reader.memory) for name, reader in readers.items()]
    variants += [Variant(f"{name}: cold disk", reader.disk, reader.forget) for name, reader in readers.items()]
    samples = alternate(variants, options.rounds, options.rounds, lm.device, label="codecs")
    pairs = [(f"{name}: {place}", f"raw: {place}") for name in lossy(options.codecs) for place in PLACES]
    return dict(summarise(samples)), {f"{a} / {b}": ratio(samples, a, b) for a, b in pairs}


def goals(figures: dict[str, Any], ratios: dict[str, Any], stated: bool) -> list[Goal]:
    found = [
        Goal(f"{name}, bytes / bfloat16, {what}", "at most", SIZES[name], measured, True)
        for name in SIZES
        if name in figures["sizes"]
        for what, measured in figures["sizes"][name].items()
    ]
    for name, limit in AGREEMENT.items():
        own = figures.get("fidelity", {}).get(name)
        if own is None:
            continue
        enough = own["questions"] >= STATED_QUESTIONS
        found.append(Goal(f"{name}, first token as with raw", "at least", limit, own["top1_agreement"], enough))
    found += list(_pruned_goals(figures.get("fidelity", {})))
    for name in lossy(figures["rates"]) if ratios else ():
        memory, disk = (ratios[f"{name}: {place} / raw: {place}"] for place in PLACES)
        if name == "int8":
            found.append(Goal.of("int8 from memory / raw", "at most", 1.10, memory, stated))
        found.append(Goal.of(f"{name} from a cold disk / raw", "at most", 1.0, disk, stated))
    return found


def _pruned_goals(fidelity: dict[str, Any]) -> Iterator[Goal]:
    """Of KVzip alone and with a codec: bytes, and right answers as a share of those over raw blocks."""
    for name, (size, answered) in PRUNED_GOALS.items():
        own = fidelity.get(name)
        if own is not None:
            enough, share = own["questions"] >= STATED_QUESTIONS, own["exact_match"] / fidelity["raw"]["exact_match"]
            yield Goal(f"{name}, bytes / bfloat16", "at most", size, own["bytes_of_bfloat16"], True)
            yield Goal(f"{name}, right answers / raw's", "at least", answered, share, enough)


def pruned_lines(fidelity: dict[str, Any]) -> list[str]:
    """A table of what KVzip left, beside the same codecs over all KV."""
    shown = [name for name in fidelity if "kept" in name or name in PRUNED]
    lines = ["| blocks | bytes / bfloat16 | first token as raw | KL mean | exact match |", "|---|---|---|---|---|"]
    for name in shown if len(shown) > 1 else ():
        own = fidelity[name]
        numbers = f"{own['top1_agreement']:.4f} | {own['kl_mean']:.1e} | {own['exact_match']:.3f}"
        lines.append(f"| `{name}` | {own['bytes_of_bfloat16']:.3f} | {numbers} |")
    return ["", *lines] if len(lines) > 2 else []


def markdown(figures: dict[str, Any], ratios: dict[str, Any]) -> list[str]:
    lines = [
        "| codec | bytes / bfloat16 | encode MB/s | decode MB/s | first token as raw | KL mean | exact match "
        "| TTFT memory / raw | TTFT cold disk / raw |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in figures["rates"]:
        own, rate = figures.get("fidelity", {}).get(name), figures["rates"][name]
        encoded = "-" if name == "raw" else f"{rate['encode_mb_per_s']:.0f}"
        sized = statistics.mean(figures["sizes"][name].values()) if name in figures["sizes"] else 1.0
        ttft = [ratios.get(f"{name}: {place} / raw: {place}") for place in PLACES]
        lines.append(
            f"| `{name}` | {sized:.3f} | {encoded} | {rate['decode_mb_per_s']:.0f} "
            + (
                f"| {own['top1_agreement']:.4f} | {own['kl_mean']:.1e} | {own['exact_match']:.3f} | "
                if own
                else "| - | - | - | "
            )
            + " | ".join("-" if one is None else f"{one.median:.2f}" for one in ttft)
            + " |"
        )
    return lines + pruned_lines(figures.get("fidelity", {}))


def parse(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.codecs", description=__doc__)
    parser.add_argument("--questions", type=int, default=100, help="of each kind; 0 leaves fidelity out")
    parser.add_argument("--rounds", type=int, default=10, help="of timing; 0 leaves times to first token out")
    parser.add_argument("--codec", choices=LOSSY, help="this one and raw, to codecs-NAME.json; all if not given")
    parser.add_argument(
        "--kept", type=float, nargs="*", help="shares of KV that KVzip leaves; those stated if left out"
    )
    parser.add_argument("--model", default="mini-long", help="whose answers are compared; bundled name or directory")
    parser.add_argument("--shape", choices=SHAPES, default="SmolLM2-135M", help="of the model that is timed")
    parser.add_argument("--passages", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workdir", type=Path, help="where stores are written; a temporary directory if not given")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(given)
    options.codecs = ["raw", options.codec] if options.codec else list(CODECS)
    return options


def main(arguments: Sequence[str] | None = None) -> Result:
    given = sys.argv[1:] if arguments is None else arguments
    options = parse(given)
    where = environment("benchmarks.codecs", given, torch.device("cpu"))
    lm = rc.load_lm(options.model, dtype="float32")
    codecs = {name: trained(lm, name, options.seed) for name in options.codecs}
    figures: dict[str, Any] = {
        "sizes": sizes(lm, options.seed, codecs),
        "rates": rates(options.rounds, options.seed, options.codecs),
    }
    with tempfile.TemporaryDirectory(dir=options.workdir, prefix="ragcache-codecs-") as directory:
        timings, ratios = first_tokens(options, Path(directory)) if options.rounds else ({}, {})
        figures["file_system"] = file_system(Path(directory))
    if options.questions:
        measured = fidelity(lm, options.questions, options.seed, ways(lm, codecs, options.seed, options.kept))
        figures["fidelity"] = {name: own.to_json() for name, own in measured.items()}
    sized = (options.shape, options.passages, options.tokens) == ("SmolLM2-135M", 10, 500)
    settings = {name: value for name, value in vars(options).items() if name not in ("out", "workdir")}
    name = "-".join(["codecs", *([] if options.questions else ["ttft"]), *([options.codec] if options.codec else [])])
    result = Result(name, settings, where, timings, ratios, figures, goals(figures, ratios, sized))
    write(result, options.out)
    lines = markdown(figures, ratios)
    (options.out / f"{name}.md").write_text("\n".join(lines) + "\n")
    show(Result(result.name, None, where, timings, ratios, {}, result.goals))
    Console(width=180).print("\n".join(lines), highlight=False)
    return result


if __name__ == "__main__":
    main()
