"""The example runs, and prints the right answers."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.mark.slow
def test_the_example_runs(tmp_path, capsys):
    runpy.run_path(str(EXAMPLES / "llama_index_query_engine.py"))["main"](str(tmp_path / "kb"))
    said = capsys.readouterr().out
    assert "Petra Elley now lives in East Thornbury." in said
    assert "which lies on the Wild Sema." in said
