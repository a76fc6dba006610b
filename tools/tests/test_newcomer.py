"""A new user's first steps with the built wheel, outside the repository."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_newcomer_gets_there(tmp_path):
    extras = ["bare", "offline", "server", "langchain", "llama-index"]
    done = run("-d", str(tmp_path), *extras)
    if done.returncode != 0 and "WARNING: Retrying" in done.stderr:
        pytest.skip("the index of packages cannot be reached")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Petra Elley now lives in East Thornbury" in done.stdout
    assert "Jonas Lansen belongs to the Chess Club Crown." in done.stdout
    assert "tram.md" in done.stdout.split("== ragcache list")[1].split("==")[0]
    assert done.stdout.endswith("== all went well\n")


def test_an_extra_without_a_check_is_named():
    done = run("bare", "nonsense")
    assert done.returncode == 2
    assert "there is no check of the extra 'nonsense'; there are: bare offline gguf" in done.stderr


def test_each_extra_for_users_has_a_check():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    script = (ROOT / "scripts" / "newcomer").read_text(encoding="utf-8")
    checked = set(re.findall(r"^check_([\w-]+)\(\)", script, re.MULTILINE))
    others = {"vllm", "llamacpp", "otel", "docs", "bench", "dev"}  # the script's head says why
    assert checked | others == {"bare", *project["optional-dependencies"]}
    assert all(f"`{extra}`" in script for extra in others)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([ROOT / "scripts" / "newcomer", *arguments], capture_output=True, text=True, check=False)
