"""The files for operators: what they start understands its options, and what they show exists."""

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import typer
import yaml

from ragcache.cli.commands import build_app
from ragcache.store.remote import SCHEMES

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
COMMANDS = typer.main.get_command(build_app()).commands


def check_command(words: list[str]) -> None:
    """Parse the words as `ragcache` would, without running the command."""
    name, *rest = words
    COMMANDS[name].make_context(name, list(rest))


def compose() -> dict:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def test_the_composed_server_understands_its_options_and_finds_its_neighbours():
    services = compose()["services"]
    words = services["ragcache"]["command"]
    check_command(words)
    given = dict(word.removeprefix("--").split("=", 1) for word in words[1:])
    assert re.match(r"postgresql://ragcache@postgres/", given["database"])
    assert given["remote"].split(":")[0] in SCHEMES
    assert set(services["ragcache"]["depends_on"]) == services.keys() - {"ragcache"}
    assert (DEPLOY / services["ragcache"]["build"]["context"] / services["ragcache"]["build"]["dockerfile"]).is_file()
    for service in services.values():
        for volume in service.get("volumes", ()):
            assert volume.split(":")[0] in compose()["volumes"]


def test_the_image_installs_extras_that_exist_and_starts_a_command():
    text = (DEPLOY / "Dockerfile").read_text()
    lines = dict(re.findall(r"^([A-Z]+) (.*)$", text.replace("\\\n", ""), re.M))
    assert json.loads(lines["ENTRYPOINT"]) == ["ragcache"]
    check_command(json.loads(lines["CMD"]))
    extras = re.search(r"/source\[(.*?)\]", text)[1].split(",")
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) <= known.keys()
    assert int(lines["USER"]) > 0, "a number: Kubernetes refuses a name where root is forbidden"


def unit() -> str:
    return (DEPLOY / "ragcache.service").read_text()


def test_the_unit_starts_a_command_and_waits_longer_than_it_drains():
    start = shlex.split(re.search(r"^ExecStart=(.*)$", unit(), re.M)[1])
    assert Path(start[0]).name == "ragcache"
    check_command(start[1:])
    drain, stop = start[start.index("--drain") + 1], re.search(r"^TimeoutStopSec=(\d+)$", unit(), re.M)[1]
    assert int(drain) < int(stop)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_finds_no_fault_in_the_unit(tmp_path):
    there = unit().replace("/opt/ragcache/bin/ragcache", shutil.which("true"))
    (tmp_path / "ragcache.service").write_text(there)
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", tmp_path / "ragcache.service"], capture_output=True, text=True
    )
    faults = [line for line in checked.stderr.splitlines() if "ragcache.service" in line]
    assert not faults, faults
    (tmp_path / "bad.service").write_text(there.replace("NoNewPrivileges", "NoNewPriviledges"))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", tmp_path / "bad.service"], capture_output=True, text=True
    )
    assert "NoNewPriviledges" in checked.stderr
