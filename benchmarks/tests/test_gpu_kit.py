"""The benchmark `gpu`: stages with limits, a run that continues where it stopped, and its page."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu import Outcome, Settings, Stage
from benchmarks.runner import main, module_of, parse


def stage(name: str, code: str, limit_s: float = 60) -> Stage:
    return Stage(name, [sys.executable, "-c", code], limit_s)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    """Return a function that runs the benchmark with given stages, and returns their outcomes and the written page."""

    def kit(every: list[Stage], out: Path, *options: str) -> tuple[dict[str, Outcome], str]:
        monkeypatch.setattr(gpu, "stages", lambda *_: iter(every))
        result = main("gpu", ["--device", "cpu", "--out", str(out), *options])
        found = {name: Outcome(**one) for name, one in result.to_json()["figures"]["stages"].items()}
        return found, (out / "gpu.md").read_text(encoding="utf-8")

    return kit


def test_a_stage_that_hangs_or_fails_costs_no_other_one(run, tmp_path: Path) -> None:
    every = [
        stage("hangs", "import time; print('begun', flush=True); time.sleep(60)", 1),
        stage("fails", "print('what'); raise SystemExit('no such card')"),
        stage("works", f"open({str(tmp_path / 'ran')!r}, 'a').write('x')"),
    ]
    found, page = run(every, tmp_path)
    assert {name: one.status for name, one in found.items()} == {
        "hangs": "out of time", "fails": "failed", "works": "done",
    }  # fmt: skip
    assert found["hangs"].tail == "begun\n"
    assert found["hangs"].seconds < 30
    assert "| works | done |" in page
    assert "fails: `no such card`" in page
    again, _ = run(every[1:], tmp_path)  # goes on: what is done does not run again
    assert (tmp_path / "ran").read_text(encoding="utf-8") == "x"
    assert again["works"].status == "done"
    run(every[2:], tmp_path, "--again")
    assert (tmp_path / "ran").read_text(encoding="utf-8") == "xx"


def test_time_that_is_over_leaves_the_rest_as_not_run(run, tmp_path: Path) -> None:
    every = [stage("slow", "import time; time.sleep(60)"), stage("late", "pass")]
    found, page = run(every, tmp_path, "--minutes=0.02")
    assert found["slow"].status == "out of time"
    assert "late" not in found
    assert "| late | not run |" in page


def test_the_page_has_the_measured_ratios_beside_the_goals(run, tmp_path: Path) -> None:
    ratio = {"median": 0.12, "low": 0.11, "high": 0.13, "pairs": 10}
    name = "reposition: device memory / transformers: full prefill"
    for folder, median in ((tmp_path, 0.12), (tmp_path / "no-graphs", 0.25), (tmp_path / "plain", 0.31)):
        folder.mkdir(exist_ok=True)
        result = {"ratios": {name: {**ratio, "median": median}}}
        (folder / "ttft-Llama-3.1-8B-bfloat16-cuda-10x500.json").write_text(json.dumps(result), encoding="utf-8")
    _, written = run([stage("ttft", "pass")], tmp_path)
    found = " | ".join(f"{median} (0.110 to 0.130, n=10)" for median in ("0.120", "0.250", "0.310"))
    assert f"| device memory / full prefill | {found} | 0.1 |" in written
    unknown = " | ".join(["not measured"] * 3)
    assert f"| disk, cold / full prefill | {unknown} | 1.05 |" in written
    assert f"| decode of one, tokens/s / transformers | {unknown} | 2.5 |" in written


def test_every_stage_names_a_program_that_takes_its_options(tmp_path: Path) -> None:
    """The benchmarks themselves parse the command lines; nothing is measured."""
    real = {"model": tmp_path, "data": tmp_path, "rows": tmp_path}
    parsed = []
    for quick in (True, False):
        for one in gpu.stages(Settings(device="cpu", quick=quick, vllm=sys.executable, **real), tmp_path):
            if "benchmarks" in one.command:
                name, *arguments = one.command[one.command.index("benchmarks") + 1 :]
                parse(module_of(name), name, arguments)
                parsed.append(name)
    assert {"ttft", "methods", "decode", "askers", "ingest", "answers", "vllm_placing"} == set(parsed)


def test_stages_inside_vllm_are_skipped_with_a_reason(tmp_path: Path) -> None:
    """They are skipped if there is no vLLM, and do not exist without --vllm."""

    def inside(vllm: str | None) -> list[Stage]:
        return [one for one in gpu.stages(Settings(vllm=vllm), tmp_path) if one.name.startswith("vllm")]

    assert not inside(None)
    absent = inside(str(tmp_path / "none"))
    known: dict[str, Outcome] = {}
    list(gpu.run_stages(absent, known, 1))
    assert {one.status for one in known.values()} == {"skipped"}
    assert known["vllm"].tail.startswith(f"{tmp_path / 'none'} does not run")
    if find_spec("vllm") is None:
        assert inside(sys.executable)[0].skipped == f"{sys.executable} has no vLLM"
