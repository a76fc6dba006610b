"""What a new user does with the built wheel, outside the repository."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_newcomer_gets_there(tmp_path):
    done = subprocess.run([ROOT / "scripts" / "newcomer", tmp_path], capture_output=True, text=True, check=False)
    reached = [line for line in done.stdout.splitlines() if line.startswith("== ")]
    if done.returncode != 0 and reached[-1].startswith("== pip ") and "WARNING: Retrying" in done.stderr:
        pytest.skip("the index of packages cannot be reached")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Petra Elley now lives in East Thornbury" in done.stdout
    assert "Jonas Lansen belongs to the Chess Club Crown." in done.stdout
    assert "tram.md" in done.stdout.split("== ragcache list")[1].split("==")[0]
    assert done.stdout.endswith("== all went well\n")
