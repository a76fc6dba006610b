"""README's picture of the first token: it shows the recorded medians, and the page and the file agree with them."""

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from matplotlib.patches import Rectangle

from benchmarks import plots

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "ttft-SmolLM2-135M-float32-cpu-10x500.json"
PICTURE = ROOT / "docs" / "images" / "first-token.png"
PHASES = ["transformers: full prefill", "reposition: disk, cold page cache", "reposition: memory tier", "floor"]


@pytest.fixture
def result() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
    return found


def test_bars_and_their_labels_are_the_recorded_medians(result: dict[str, Any]) -> None:
    for number, name in enumerate(PHASES):  # figures of its own: a picture with numbers written into it would differ
        result["timings"][name]["median_s"] = 40.0 - 9.75 * number
    (ax,) = plots.draw_ttft(result).axes
    bars = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
    assert [bar.get_width() for bar in bars] == [40.0, 30.25, 20.5, 10.75]
    assert [text.get_text() for text in ax.texts] == ["40.0 s", "30.2 s", "20.5 s", "10.8 s"]
    assert len(ax.get_yticklabels()) == len(PHASES)


def test_readme_states_what_the_picture_shows(result: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^!\[(Seconds to the first token.*)\]\(images/first-token\.png\)$", page, re.M)
    stated = [float(number) for number in re.findall(r"\d+\.\d+", line)]
    recorded = [result["timings"][name]["median_s"] for name in PHASES]
    assert stated == [round(recorded[0], 1), *(round(seconds, 2) for seconds in recorded[1:])]
    assert f"takes {stated[2]:g} s where full prefill takes {stated[0]:g} s" in " ".join(_readme().split())


def test_the_committed_picture_is_a_small_opaque_png(tmp_path: Path) -> None:
    plots.main([str(RESULT), str(tmp_path / "again.png")])
    committed, again = PICTURE.read_bytes(), (tmp_path / "again.png").read_bytes()
    assert committed[:8] == again[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", committed[16:24]) == struct.unpack(">II", again[16:24])
    assert len(committed) < 60_000
    assert imread(PICTURE)[..., 3:].min(initial=1) == 1


def _readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")
