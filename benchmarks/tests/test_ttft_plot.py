"""README's picture of the first token shows the recorded medians, and page and file agree with them."""

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.patches import Rectangle

from benchmarks import plots

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "ttft-SmolLM2-135M-float32-cpu-10x500.json"
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
