"""The connector's tests with vLLM's V2 model runner, a GPU's default, its kernels and ours in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="runs in vLLM's own environment")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]
HERE = Path(__file__).parent


def test_the_v2_runner_answers_alike() -> None:
    paths = [str(HERE / "interpreted"), os.environ.get("PYTHONPATH", "")]
    v2 = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    # All but the hundred plain requests, which have nothing of the kernel in them and take the interpreter longest.
    tests = ["-c", HERE / "vllm.ini", "--confcutdir", HERE, HERE / "test_connector.py", "-k", "not hundred"]
    command = [sys.executable, "-m", "pytest", "-q", "-s", *tests]
    ran = subprocess.run(command, env={**os.environ, **v2}, capture_output=True, text=True, check=False)
    said = ran.stdout + ran.stderr
    assert ran.returncode == 0, said
    assert "Using V2 Model Runner" in said
    assert "stored blocks are placed by one kernel a layer" in said
