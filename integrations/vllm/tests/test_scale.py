"""The deployments of docs/scale.md: files that parse, and commands that ragcache understands."""

import shlex
from pathlib import Path

import pytest
import typer
import yaml

from ragcache.cli.commands import build_app

SCALE = Path(__file__).resolve().parents[3] / "examples" / "scale"


def compose_commands() -> list[list[str]]:
    services = yaml.safe_load((SCALE / "compose.yaml").read_text())["services"]
    return [shlex.split(services[name]["command"]) for name in ("vllm", "front")]


def pod_commands() -> list[list[str]]:
    documents = list(yaml.safe_load_all((SCALE / "kubernetes.yaml").read_text()))
    (pods,) = [one for one in documents if one["kind"] == "StatefulSet"]
    return [one["command"] for one in pods["spec"]["template"]["spec"]["containers"]]


@pytest.mark.parametrize("words", [*compose_commands(), *pod_commands()], ids=lambda words: " ".join(words[:2]))
def test_its_commands_are_understood(words):
    assert words[0] == "ragcache"
    command = typer.main.get_command(build_app()).commands[words[1]]
    context = command.make_context(words[1], list(words[2:]))
    assert str(context.params["store"]) == "/kb"


def test_vllm_and_the_front_share_a_directory():
    services = yaml.safe_load((SCALE / "compose.yaml").read_text())["services"]
    stores = {volume for name in ("vllm", "front") for volume in services[name]["volumes"] if volume.endswith(":/kb")}
    assert stores == {"store:/kb"}


def test_passwords_come_from_the_environment_alone():
    lines = [line for line in (SCALE / "compose.yaml").read_text().splitlines() if not line.startswith("#")]
    secrets = [line for line in lines if "PASSWORD:" in line or "SECRET" in line.partition(":")[0]]
    assert len(secrets) == 4
    assert all("${" in line and ":?" in line for line in secrets)
