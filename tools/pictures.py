"""Draw the pictures of README.md and docs/how-it-works.md: python -m tools.pictures [DIRECTORY]."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
MEASURED = ROOT / "benchmarks" / "results" / "answers-smollm2-company.json"
TEXT, LINE, KV, RUN, PLAIN = "#1f2430", "#5c6370", "#cfe3f7", "#f7d9b0", "#f4f5f7"


def box(x: int, y: int, width: int, lines: Sequence[str], fill: str = PLAIN, height: int = 44) -> Iterator[str]:
    """Yield a box with centred lines of text. x, y, width, height: pixels."""
    yield f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{fill}" stroke="{LINE}"/>'
    top = y + height / 2 - 8 * (len(lines) - 1) + 5
    for rank, line in enumerate(lines):
        yield f'<text x="{x + width / 2:g}" y="{top + 16 * rank:g}" text-anchor="middle">{escape(line)}</text>'


def arrow(x: int, y: int, to_x: int, to_y: int) -> str:
    """Return an arrow between two points."""
    return f'<path d="M{x} {y} L{to_x} {to_y}" stroke="{LINE}" fill="none" marker-end="url(#tip)"/>'


def label(x: int, y: int, text: str, anchor: str = "start") -> str:
    """Return a line of text."""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def ingestion() -> Iterator[str]:
    """Yield the picture of a document's way into the store."""
    steps = [["files"], ["passages", "(chunker)"], ["embedding", "(embedder)"], ["KV block", "(language model)"]]
    for rank, lines in enumerate(steps):
        yield from box(10 + 190 * rank, 20, 150, lines, KV if rank == 3 else PLAIN)
        if rank:
            yield arrow(190 * rank - 30, 42, 190 * rank + 8, 42)
    kept = [("text, metadata", "SQL", 200), ("vector", "index", 390), ("keys and values", "disk, memory, remote", 580)]
    for name, where, x in kept:
        yield arrow(x + 75, 64, x + 75, 108)
        yield from box(x, 110, 150, [name, where])
    yield label(10, 137, "the store keeps:")


def question() -> Iterator[str]:
    """Yield the picture of a question's way to its first token."""
    yield from box(10, 20, 130, ["question"], RUN)
    yield arrow(140, 42, 178, 42)
    yield from box(180, 20, 150, ["retrieve", "passages B and D"])
    yield arrow(330, 42, 368, 42)
    yield from box(370, 20, 150, ["load their blocks"], KV)
    yield arrow(520, 42, 558, 42)
    yield from box(560, 20, 170, ["rotate keys to the", "places in this prompt"], KV)
    yield arrow(645, 64, 645, 108)
    parts = [("system prompt", 130, KV), ("B", 150, KV), ("D", 150, KV), ("question", 150, RUN)]
    x = 80
    for name, width, fill in parts:
        yield from box(x, 110, width, [name], fill)
        x += width
    yield arrow(x, 132, x + 38, 132)
    yield label(x + 44, 137, "first token")
    yield label(80, 180, "blue: KV that was there; orange: tokens that the model runs now")


def attention() -> Iterator[str]:
    """Yield the picture of attention in a prompt of two passages: full prefill, blocks, and blocks with `epic`."""
    parts = [("S", 2), ("B", 4), ("D", 4), ("Q", 3)]
    kinds = [name for name, count in parts for _ in range(count)]
    repaired = {kinds.index("B"), kinds.index("D")}
    titles = ["full prefill", "blocks (reposition)", "blocks, first tokens run again (epic)"]
    for picture, title in enumerate(titles):
        left = 24 + 255 * picture
        yield label(left, 22, title)
        for row, kind in enumerate(kinds):
            yield label(left - 4, 45 + 16 * row, kind, "end")
            for column, other in enumerate(kinds[: row + 1]):
                runs = picture == 0 or kind == "Q" or (picture == 2 and row in repaired)
                seen = runs or kind == other or (other == "S" and kind != "S")
                fill = RUN if runs else KV if seen else PLAIN
                place = f'x="{left + 16 * column}" y="{34 + 16 * row}"'
                yield f'<rect {place} width="14" height="14" fill="{fill}" stroke="{LINE}" stroke-width="0.5"/>'
    yield label(20, 264, "rows attend to columns: S system prompt, B and D passages, Q question")
    yield label(20, 284, "orange: computed at the question; blue: computed at ingestion; grey: never computed")


COMPANY = "recipe=primer:primer=64:neighbours=2"
BARS = {
    "full": "full prefill",
    "cacheblend:ratio=0.3": "cacheblend, 36 % computed",
    f"epic:first_tokens=16:{COMPANY}": "ragcache by default, 14 % computed",
    f"reposition:{COMPANY}": "reposition, 3 % computed",
}
"""Methods of `MEASURED` and their labels in the picture of a real model."""


def real_model() -> Iterator[str]:
    """Yield bars of the seconds to the first token and the KL from full prefill, for SmolLM2."""
    rows = {row["method"]: row for row in json.loads(MEASURED.read_text())["figures"]["rows"] if row["set"] == "all"}
    scale = 380 / rows["full"]["first_token_s"]
    for rank, (method, name) in enumerate(BARS.items()):
        row, y = rows[method], 12 + 36 * rank
        yield label(252, y + 18, name, "end")
        width = row["first_token_s"] * scale
        yield f'<rect x="260" y="{y}" width="{width:.0f}" height="26" rx="4" fill="{RUN if rank == 0 else KV}"/>'
        distance = "the reference" if rank == 0 else f"KL {row['kl'][0]:.2f}"
        yield label(round(268 + width), y + 18, f"{row['first_token_s']:.2g} s, {distance}")


PICTURES = {
    "real-model": (real_model, 790, 156),
    "ingestion": (ingestion, 770, 170),
    "question": (question, 800, 200),
    "attention": (attention, 800, 300),
}


def picture(name: str) -> str:
    """Return a picture as SVG."""
    draw, width, height = PICTURES[name]
    style = f'font-family="sans-serif" font-size="13" fill="{TEXT}"'
    tip = f'<path d="M0 0 L8 4 L0 8 Z" fill="{LINE}"/>'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {style}>',
        f'<marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">{tip}</marker>',
        '<rect width="100%" height="100%" fill="white"/>',
        *draw(),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def main(directory: Path = IMAGES) -> None:
    """Write all pictures into a directory."""
    for name in PICTURES:
        (directory / f"{name}.svg").write_text(picture(name), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
