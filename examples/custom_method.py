"""A fusion method of your own: the tokens at both edges of every passage run again.

python examples/custom_method.py

The passages are cut in mid-sentence: a passage ends with a name, and the next passage begins with a statement about it.
Read apart, the KV of the second passage lacks the name. Each method is compared with full prefill at the token that
depends on it: the token that names the club.
"""

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch

import ragcache as rc

PEOPLE = Path(__file__).parent / "corpus" / "people"


@dataclass(frozen=True)
class Edges(rc.RecomputeMethod):
    """Runs the first and last tokens of each passage again: the first were encoded without the text before them, and
    the next passage continues from the last.

    The fields are the method's options; `candidates` is the only function that it needs.

    first, last: number of tokens of each passage that run again, in every layer; both 0 is `reposition`
    """

    first: int = 6
    last: int = 2

    name: ClassVar[str] = "edges"
    paper: ClassVar[str] = "examples/custom_method.py"
    summary: ClassVar[str] = "runs the first and last tokens of each passage again"

    def candidates(self, context: rc.RecomputeContext) -> torch.Tensor:
        slots: set[int] = set()
        for start, count in zip(context.chunk_starts, context.chunk_tokens, strict=True):
            passage = range(start, start + count)
            slots.update(passage[: self.first], passage[max(0, count - self.last) :])
        return torch.tensor(sorted(slots), dtype=torch.int64, device=context.lm.device)


class Cut(NamedTuple):
    """A person's entry in two pieces. The first piece ends with the name, the second names the person's club."""

    name: str
    club: str
    pieces: tuple[str, str]


def cut_entries(count: int) -> list[Cut]:
    found = []
    for path in sorted(PEOPLE.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        name = text.splitlines()[0].removeprefix("# ")
        end = text.rindex(name.split()[-1]) + len(name.split()[-1])
        head, tail = text[:end], text[end:].lstrip()
        if club := re.search(r"the (\w+ (?:Club|Circle|Society) \w+)", tail):
            found.append(Cut(name, club[1], (head + "\n", tail)))
    return found[:count]


def prompt_to_the_club(lm: rc.LanguageModel, passages: list[str], cut: Cut) -> rc.Prompt:
    """Return a prompt of the question and the beginning of its answer: the next token begins the club's name."""
    form = rc.prompt_format(lm.tokenizer)

    def ids(text: str) -> list[int]:
        return lm.tokenizer(text, add_special_tokens=False)["input_ids"]

    suffix = form.suffix_text(question(cut)) + f" {cut.name} belongs to the"
    return rc.Prompt(form.prefix_ids, [ids(text) for text in passages], ids(suffix))


def question(cut: Cut) -> str:
    return f"Which club does {cut.name} belong to?"


def divergence(fused: rc.FuseOutput, full: rc.FuseOutput) -> float:
    """Return the Kullback-Leibler divergence of the next token's distribution from full prefill's, in nats."""
    wanted, found = (torch.log_softmax(one.next_logits, dim=-1) for one in (full, fused))
    return max(0.0, float((wanted.exp() * (wanted - found)).sum()))  # rounding can end just below 0


METHODS: list[str | rc.FusionMethod] = [
    "reposition",
    Edges(first=0, last=2),
    Edges(first=1, last=0),
    Edges(),
    Edges(first=12, last=4),
    "full",
]


class Compared(NamedTuple):
    """The comparison of a method with full prefill, for a question."""

    kl: float
    same_token: bool
    right: bool
    computed_share: float


def compare(kb: rc.RagCache, passages: list[str], cut: Cut) -> list[Compared]:
    """Compare each of METHODS: `rc.fuse` gives the next token's distribution, `kb.ask` writes the answer."""
    prompt = prompt_to_the_club(kb.lm, passages, cut)
    blocks = rc.encode(kb.lm, prompt)
    full = rc.fuse(kb.lm, prompt, "full")
    rows = []
    for method in METHODS:
        fused = rc.fuse(kb.lm, prompt, method, None if method == "full" else blocks)
        answer = kb.ask(question(cut), hits=[rc.Passage(text) for text in passages], method=method)
        rows.append(
            Compared(
                divergence(fused, full),
                bool(fused.next_logits.argmax() == full.next_logits.argmax()),
                cut.club in answer.text,
                max(fused.computed_tokens) / fused.prompt_tokens,
            )
        )
    return rows


def main(directory: str) -> None:
    with rc.RagCache.open(directory) as kb:
        rows = []
        for four in (cut_entries(8)[:4], cut_entries(8)[4:]):
            passages = [piece for cut in four for piece in cut.pieces]
            rows += [compare(kb, passages, cut) for cut in four]
    print(f"{'method':<30} {'KL':>7} {'same token':>11} {'right':>6} {'computed':>9}")
    for method, found in zip(METHODS, zip(*rows, strict=True), strict=True):
        kl, same, right, computed = (sum(column) / len(found) for column in zip(*found, strict=True))
        print(f"{method!s:<30} {kl:7.3f} {same:11.0%} {right:6.0%} {computed:9.0%}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        main(directory)
