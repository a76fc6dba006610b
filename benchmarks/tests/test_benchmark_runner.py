"""The runner: settings from the command line, a journal that continues a killed run, and unknown names."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import timing
from benchmarks.environment import environment
from benchmarks.journal import Journal, worst_of
from benchmarks.runner import NAMES, command, main, module_of, parse
from ragcache.errors import ConfigError

DECODE = ["--shape=toy", "--context=30", "--tokens=4", "--rounds=3"]


@dataclass(frozen=True)
class Settings:
    """A setting of every kind."""

    path: Path
    count: int = 3
    share: float = 0.5
    names: tuple[str, ...] = ("a", "b")
    sizes: tuple[int, ...] = (1,)
    again: bool = False
    keep: Path | None = None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError("--count is 0; give 1 or more")


def parsed(*arguments: str) -> Settings:
    module = SimpleNamespace(Settings=Settings, __doc__="One.")
    return parse(module, "one", ["--path", "p", *arguments])[0]  # type: ignore[arg-type]


def test_settings_have_the_types_of_their_fields() -> None:
    assert parsed() == Settings(Path("p"))
    given = ["--set", "count=4", "--set", "names=x,y", "--set=names=z", "--sizes", "2", "3", "--again", "--keep", "k"]
    expected = Settings(Path("p"), 4, 0.5, ("x,y", "z"), (2, 3), True, Path("k"))
    assert parsed(*given) == expected
    assert (
        parsed("--count=4", "--names", "x,y", "z", "--set", "sizes=2", "--sizes=3", "--again=yes", "--keep=k")
        == expected
    )
    assert not parsed("--again", "no").again


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--set", "cuont=4"], "unrecognized arguments: --cuont=4"),
        (["--count", "many"], "invalid int value: 'many'"),
        (["--count", "0"], "--count is 0; give 1 or more"),
        (["--set"], "--set: expected one argument"),
    ],
)
def test_settings_that_are_none_are_named(wrong: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(*wrong)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_every_benchmark_is_listed_and_takes_its_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert command([]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == list(NAMES)
    for name, line in zip(NAMES, listed, strict=True):
        module = module_of(name)
        assert line.endswith((module.__doc__ or "").splitlines()[0])
        assert callable(module.measure)
        if name != "answers":  # it needs a model
            assert parse(module, name, [])[0] == module.Settings()
    assert command(["ttfft"]) == 1
    assert "there is no benchmark 'ttfft'; choose one of answers, " in capsys.readouterr().err


def test_a_run_that_was_killed_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[dict[str, float]] = []
    measured = timing._round

    def killed_in_the_third(*arguments):
        if len(rounds) == 3:  # one that warms up, two that count
            raise KeyboardInterrupt
        rounds.append(measured(*arguments))
        return rounds[-1]

    monkeypatch.setattr(timing, "_round", killed_in_the_third)
    with pytest.raises(KeyboardInterrupt):
        main("decode", [*DECODE, "--out", str(tmp_path)])
    (path,) = tmp_path.glob("decode-*.journal.jsonl")
    path.write_text(path.read_text() + '{"key": "round 2", "va', encoding="utf-8")  # it was writing
    before = list(rounds)
    monkeypatch.setattr(timing, "_round", lambda *arguments: rounds.append(measured(*arguments)) or rounds[-1])
    with pytest.raises(ConfigError, match=r"holds figures of other settings.*--journal"):
        main("decode", [*DECODE, "--seed=1", "--journal", str(path), "--out", str(tmp_path)])
    result = main("decode", [*DECODE, "--out", str(tmp_path)])
    assert len(rounds) == len(before) + 2, "the warm-up and the third round"
    ours = sorted(one["ragcache, a token"] for one in [*before[1:], rounds[-1]])
    timed = result.timings["ragcache, a token"]
    assert (timed.min_s, timed.median_s, timed.max_s) == tuple(ours)
    assert not list(tmp_path.glob("*.jsonl"))


def test_a_loaded_run_of_a_journal_leaves_no_verdict(tmp_path: Path) -> None:
    where = replace(environment("x", [], torch.device("cpu")), load_1min=0.1, clean=True)
    loaded = replace(where, load_1min=7.5, clean=False)
    Journal(tmp_path / "j.jsonl", {"seed": 1}, loaded).add("a", 1)
    again = Journal(tmp_path / "j.jsonl", {"seed": 1}, where)
    assert (again.environment().load_1min, again.environment().clean) == (7.5, False)
    assert again.done == {"a": 1}
    again.remove()
    assert Journal(tmp_path / "j.jsonl", {"seed": 2}, where).environment() == where == worst_of(where, [])


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "j.jsonl").write_text(json.dumps({"seed": 1}) + "\n{]\n")
    with pytest.raises(ConfigError, match=r"j\.jsonl, line 2: not JSON"):
        Journal(tmp_path / "j.jsonl", {"seed": 1}, environment("x", [], torch.device("cpu")))


def test_nothing_of_this_machine_is_in_a_result(tmp_path: Path) -> None:
    result = main("decode", [*DECODE, f"--out={tmp_path}", "--workdir", str(tmp_path / "work"), "--name", "named"])
    assert result.environment.command.startswith("python -m benchmarks decode --shape=toy")
    assert str(tmp_path) not in (tmp_path / "named.json").read_text() + (tmp_path / "named.md").read_text()
    assert not list((tmp_path / "work").iterdir())
