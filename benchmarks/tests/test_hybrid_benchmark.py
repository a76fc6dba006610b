"""The benchmark of recurrent layers runs, counts a block's bytes, and holds itself against its goal."""

import json

import pytest

from benchmarks.hybrid import FLOOR, FULL, INT8, OURS, main


@pytest.mark.slow
def test_it_measures_every_way_and_counts_the_bytes_of_a_block(tmp_path):
    sizes = ["--shape=toy", "--passages=2", "--tokens=40", "--suffix=5", "--rounds=1"]
    result = main([*sizes, "--out", str(tmp_path)])
    written = json.loads((tmp_path / f"{result.name}.json").read_text())
    assert written["timings"].keys() == {OURS, INT8, FLOOR, FULL}
    figures = written["figures"]
    # Three recurrent layers of two heads: P and Q of 16 x 16 each, and a window of 4 of 96 channels, in float32.
    assert figures["a block's maps, bytes"] == 3 * (2 * 2 * 16 * 16 + 4 * 96) * 4
    assert figures["a block, bytes"] == figures["a block's maps, bytes"] + figures["a block's KV, bytes"]
    assert figures["a block's KV, bytes"] == 40 * 2 * 2 * 16 * 4
    assert 2 < figures["a block, bytes"] / figures["a block with int8, bytes"] < 4
    assert 0 < figures["logits by int8, distance / norm"] < 0.05
    (goal,) = written["goals"]
    assert (goal["limit"], goal["applies"]) == (0.05, False)
