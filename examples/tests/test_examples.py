"""The examples run from any folder, and print right figures; their page names all of them."""

import os
import re
import runpy
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from families import random_prompt

import ragcache as rc

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
needs_mini = pytest.mark.skipif(
    not (ROOT / "ragcache" / "mini" / "config.json").is_file(), reason="the bundled model is missing"
)


def run(name: str, folder: Path) -> str:
    """Run an example as a user does, in an otherwise empty folder, and return its standard output."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@needs_mini
@pytest.mark.timeout(600)
def test_quickstart(tmp_path):
    first, second = run("quickstart.py", tmp_path), run("quickstart.py", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["quickstart-kb"]
    added, tokens = re.match(r"(\d+) added, 0 unchanged; (\d+) tokens read\n", first).groups()
    assert int(added) == len([path for path in (EXAMPLES / "corpus").rglob("*.*") if path.is_file()])
    assert int(tokens) > 9000
    assert second.startswith(f"0 added, {added} unchanged; 0 tokens read\n")
    for said in (first, second):
        assert said.splitlines()[1] == "Petra Elley now lives in East Thornbury, which lies on the Wild Sema."
        computed, prompt = map(int, re.search(r"^(\d+) of (\d+) prompt tokens", said, re.M).groups())
        assert 4 * 5 < computed < prompt / 2  # five link tokens a passage, the question; not the passages
    assert re.findall(r"KV from (\w+)", first) == ["memory"] * 4
    assert re.findall(r"KV from (\w+)", second) == ["disk"] * 4


@pytest.mark.slow
@needs_mini
@pytest.mark.timeout(600)
def test_a_method_of_ones_own(tmp_path):
    said = run("custom_method.py", tmp_path)
    assert list(tmp_path.iterdir()) == []
    rows = {
        method: [float(figure) for figure in figures]
        for method, *figures in re.findall(r"^(\S.*?) +(-?\d+\.\d{3}) +(\d+)% +(\d+)% +(\d+)%$", said, re.M)
    }
    assert len(rows) == 6
    assert rows["full"] == [0, 100, 100, 100]
    kl, same, right, computed = rows["reposition"]
    assert kl > 0.5
    assert same < 50
    assert right < 50
    own = rows["Edges(first=6, last=2)"]
    assert own[0] < 0.1
    assert own[1] >= 85
    assert own[2] >= 85
    assert computed < own[3] < rows["Edges(first=12, last=4)"][3] < 100
    assert abs(rows["Edges(first=12, last=4)"][0]) < 0.01


@needs_mini
def test_a_method_of_ones_own_has_the_limits_of_every_recompute_method():
    names = runpy.run_path(str(EXAMPLES / "custom_method.py"), run_name="custom_method")
    lm, prompt = rc.load_lm("mini"), random_prompt(3)
    longest = max(len(chunk) for chunk in prompt.chunk_ids)
    for method, same_as in ((names["Edges"](0, 0), "reposition"), (names["Edges"](longest, 0), "full")):
        torch.testing.assert_close(
            rc.fuse(lm, prompt, method).next_logits, rc.fuse(lm, prompt, same_as).next_logits, atol=2e-4, rtol=1e-4
        )
    starts = [len(prompt.prefix_ids)]
    for chunk in prompt.chunk_ids:
        starts.append(starts[-1] + len(chunk))
    expected = {
        slot for start, end in pairwise(starts) for slot in range(start, end) if slot - start < 1 or end - slot <= 2
    }
    fused = rc.fuse(lm, prompt, names["Edges"](first=1, last=2))
    assert set(fused.computed_tokens) == {len(expected) + len(prompt.suffix_ids)}


def test_every_example_is_listed():
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| \[`?([\w./]+)`?\]\(([\w./]+)\) \|", page, re.M))
    assert all(shown == target for shown, target in listed)
    found = [*EXAMPLES.glob("*.py"), *EXAMPLES.rglob("*.ipynb")]
    there = {path.relative_to(EXAMPLES).as_posix() for path in found}
    assert {target for _, target in listed} == there
    for target in re.findall(r"\]\(([^)#\s]+)", page):
        assert "://" in target or (EXAMPLES / target).exists(), target
