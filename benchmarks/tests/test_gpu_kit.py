"""The kit for a card: stages with limits, a run that goes on where it stopped, and its page."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

from benchmarks import gpu
from benchmarks.gpu import Stage, run


def stage(name: str, code: str, limit_s: float = 60) -> Stage:
    return Stage(name, [sys.executable, "-c", code], limit_s)


def test_a_stage_that_hangs_or_fails_costs_no_other_one(tmp_path: Path) -> None:
    every = [
        stage("hangs", "import time; print('begun', flush=True); time.sleep(60)", 1),
        stage("fails", "print('what'); raise SystemExit('no such card')"),
        stage("works", f"open({str(tmp_path / 'ran')!r}, 'a').write('x')"),
    ]
    found = run(every, tmp_path, minutes=1)
    assert {name: one.status for name, one in found.items()} == {
        "hangs": "out of time", "fails": "failed", "works": "done",
    }  # fmt: skip
    assert found["hangs"].tail == "begun\n"
    assert found["hangs"].seconds < 30
    written = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert "| works | done |" in written
    assert "fails: `no such card`" in written
    again = run(every[1:], tmp_path, minutes=1)  # goes on: what is done does not run again
    assert (tmp_path / "ran").read_text(encoding="utf-8") == "x"
    assert again["works"].status == "done"
    run(every[2:], tmp_path, minutes=1, again=True)
    assert (tmp_path / "ran").read_text(encoding="utf-8") == "xx"


def test_time_that_is_over_leaves_the_rest_as_not_run(tmp_path: Path) -> None:
    every = [stage("slow", "import time; time.sleep(60)"), stage("late", "pass")]
    found = run(every, tmp_path, minutes=0.02)
    assert found["slow"].status == "out of time"
    assert "late" not in found
    assert "| late | not run |" in (tmp_path / "gpu.md").read_text(encoding="utf-8")


def test_the_page_has_the_measured_ratios_beside_the_goals(tmp_path: Path) -> None:
    ratio = {"median": 0.12, "low": 0.11, "high": 0.13, "pairs": 10}
    name = "reposition: device memory / transformers: full prefill"
    for folder, median in ((tmp_path, 0.12), (tmp_path / "no-graphs", 0.25), (tmp_path / "plain", 0.31)):
        folder.mkdir(exist_ok=True)
        result = {"ratios": {name: {**ratio, "median": median}}}
        (folder / "ttft-Llama-3.1-8B-bfloat16-cuda-10x500.json").write_text(json.dumps(result), encoding="utf-8")
    run([stage("ttft", "pass")], tmp_path, minutes=1)
    written = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    found = " | ".join(f"{median} (0.110 to 0.130, n=10)" for median in ("0.120", "0.250", "0.310"))
    assert f"| device memory / full prefill | {found} | 0.1 |" in written
    unknown = " | ".join(["not measured"] * 3)
    assert f"| disk, cold / full prefill | {unknown} | 1.05 |" in written
    assert f"| decode of one, tokens/s / transformers | {unknown} | 2.5 |" in written


def test_every_stage_names_a_program_that_takes_its_options(tmp_path: Path) -> None:
    """The command lines are parsed by the benchmarks themselves; nothing is measured."""
    import pytest

    given = gpu.parser().parse_args(["--quick", "--device", "cpu", "--out", str(tmp_path)])
    for one in gpu.stages(given):
        if "--only" in one.command:
            arguments = [*one.command[one.command.index("benchmarks.gpu") + 1 :]]
            with pytest.raises(SystemExit) as ended:
                gpu.main([*arguments, "--help"])
            assert ended.value.code == 0


def test_stages_inside_vllm_are_skipped_with_a_reason(tmp_path: Path) -> None:
    """Where vLLM is not there; without --vllm there are none."""
    import pytest

    from benchmarks import vllm_placing

    def inside(*options: str) -> list[Stage]:
        given = gpu.parser().parse_args([*options, "--out", str(tmp_path)])
        return [one for one in gpu.stages(given) if one.name.startswith("vllm")]

    assert not inside()
    absent = inside("--vllm", str(tmp_path / "none"))
    found = run(absent, tmp_path, minutes=1)
    assert {one.status for one in found.values()} == {"skipped"}
    written = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert f"vllm: `{tmp_path / 'none'} does not run" in written
    assert (
        "| inside vLLM, disk, warm / vLLM's full prefill | not measured | not measured | not measured | none |"
        in written
    )
    if find_spec("vllm") is None:
        assert inside("--vllm", sys.executable)[0].skipped == f"{sys.executable} has no vLLM"
    with pytest.raises(SystemExit) as ended:
        vllm_placing.main([*absent[0].command[3:], "--help"])
    assert ended.value.code == 0
