"""`ragcache pull`."""

from __future__ import annotations

import json

from terminal import invoke
from tiny_model import save_tiny_llama


def test_pull_says_where_a_model_is_and_how_large(tmp_path):
    directory = save_tiny_llama(tmp_path / "tiny")
    num_bytes = sum(path.stat().st_size for path in directory.iterdir())
    result = invoke("pull", directory)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{directory} is in {directory}, ")
    found = json.loads(invoke("pull", directory, "--json").stdout)
    assert found == {"model": str(directory), "path": str(directory), "bytes": num_bytes}


def test_pull_of_a_name_that_names_nothing_is_one_line():
    result = invoke("pull", "nobody/nothing")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "'nobody/nothing'" in result.stderr
    assert result.stderr.count("\n") == 1
