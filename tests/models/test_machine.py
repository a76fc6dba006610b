"""Which device and which dtype "auto" is, on machines other than this one."""

import inspect
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import save_tiny_llama
from typer.testing import CliRunner

import ragcache as rc
from ragcache.cli.commands import build_app
from ragcache.cli.flags import ModelOptions
from ragcache.errors import ConfigError
from ragcache.models import machine
from ragcache.models.machine import DEVICES, find_device, suits
from ragcache.retrieval.embedder import load_embedder
from ragcache.retrieval.reranker import load_reranker
from ragcache_demo.bag_of_words import BagOfWords
from ragcache_eval.measured_model import EvaluatedModel
from ragcache_eval.store_cases import asked_of
from ragcache_plan.rate_options import RateOptions
from ragcache_train.train_options import TrainOptions

SLOW = "no instructions"


@pytest.fixture
def machine_with(monkeypatch):
    """Let the machine have these devices beside the CPU, whose products in these dtypes have instructions."""

    def become(*devices: str, fast: tuple[torch.dtype, ...] = ()) -> None:
        monkeypatch.setattr(machine, "has_device", lambda kind: kind in {*devices, "cpu"})
        monkeypatch.setattr(machine, "multiplies", lambda dtype: dtype in {torch.float32, *fast})

    return become


@pytest.fixture
def saved_in(tmp_path):
    """A model's directory whose weights are saved in a dtype."""

    def save(dtype: torch.dtype) -> str:
        directory = tmp_path / str(dtype).removeprefix("torch.")
        save_tiny_llama(directory)
        weights = {name: weight.to(dtype) for name, weight in load_file(directory / "model.safetensors").items()}
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        config = directory / "config.json"
        config.write_text(config.read_text().replace('"float32"', f'"{str(dtype).removeprefix("torch.")}"'))
        return str(directory)

    return save


@pytest.mark.parametrize("first", range(len(DEVICES)))
def test_auto_takes_the_first_device_there_is(machine_with, first):
    machine_with(*DEVICES[first:])
    assert find_device() == find_device("auto") == torch.device(("cuda", "xpu", "mps", "cpu")[first])


def test_a_device_that_is_not_there_is_named(machine_with):
    machine_with("xpu")
    for device in ("cuda", "cuda:1", "mps"):
        with pytest.raises(ConfigError, match=f"'{device}'.*device='auto'"):
            find_device(device)
    with pytest.raises(ConfigError, match=r"'quantum'.*auto, cuda, xpu, mps, cpu"):
        find_device("quantum")
    assert find_device("cpu") == find_device(torch.device("cpu")) == torch.device("cpu")


def test_auto_is_the_default_everywhere():
    functions = (rc.load_lm, rc.RagCache.open, load_embedder, load_reranker, asked_of)
    assert {inspect.signature(one).parameters["device"].default for one in functions} == {"auto"}
    options = (EvaluatedModel, ModelOptions, RateOptions, TrainOptions)
    assert {one.__dataclass_fields__["device"].default for one in options} == {"auto"}


@pytest.mark.parametrize(
    ("own", "fast", "expected"),
    [
        (torch.bfloat16, (), torch.float32),
        (torch.bfloat16, (torch.bfloat16,), torch.bfloat16),
        (torch.float16, (torch.bfloat16,), torch.float32),
        (torch.float16, (torch.float16,), torch.float16),
        (torch.float32, (), torch.float32),
    ],
)
@pytest.mark.parametrize("dtype", [None, "auto"])
def test_auto_is_no_dtype_that_the_processor_is_slow_in(machine_with, saved_in, caplog, own, fast, expected, dtype):
    machine_with(fast=fast)
    where = saved_in(own)
    assert rc.load_lm(where, dtype=dtype).dtype == expected
    said = [record.getMessage() for record in caplog.records if SLOW in record.getMessage()]
    assert len(said) == (own != expected)
    assert all(where in line and "in float32" in line and "--dtype" in line for line in said)


def test_a_dtype_that_is_asked_for_is_taken(machine_with, saved_in, caplog):
    machine_with()
    assert rc.load_lm(saved_in(torch.bfloat16), dtype="bfloat16").dtype == torch.bfloat16
    assert SLOW not in caplog.text


def test_a_bundled_model_runs_in_float32(machine_with):
    machine_with(fast=(torch.bfloat16,))
    assert rc.load_lm("mini").dtype == torch.float32
    assert rc.load_lm("mini", dtype="auto").dtype == torch.bfloat16


def test_other_devices_than_cpus_take_the_weights_dtype(machine_with):
    machine_with("cuda")
    assert suits(torch.bfloat16, torch.device("cuda"))
    assert not suits(torch.bfloat16, torch.device("cpu"))


def test_a_store_keeps_the_dtype_that_it_was_made_in(machine_with, saved_in, tmp_path, caplog):
    where = saved_in(torch.bfloat16)
    machine_with(fast=(torch.bfloat16,))

    def opened(dtype: str | None) -> rc.RagCache:
        return rc.RagCache.open(tmp_path / "kb", model=where, dtype=dtype, embedder=BagOfWords())

    with opened(None) as kb:
        assert kb.lm.dtype == torch.bfloat16
        assert kb.doctor().advice is None
    assert SLOW not in caplog.text
    machine_with()
    for dtype in (None, "auto"):
        caplog.clear()
        with caplog.at_level(logging.WARNING), opened(dtype) as kb:
            assert kb.lm.dtype == torch.bfloat16
            assert SLOW in kb.doctor().advice
        assert len([one for one in caplog.records if SLOW in one.getMessage()]) == 1
    said = CliRunner().invoke(build_app(), ["doctor", "--store", str(tmp_path / "kb")]).output
    assert "Note: this processor has no instructions for bfloat16" in said


def test_the_processor_is_asked_by_its_kind(monkeypatch):
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False)
    monkeypatch.setattr(machine.platform, "machine", lambda: "x86_64")
    assert not machine.multiplies(torch.bfloat16)
    assert machine.multiplies(torch.float32)
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        with monkeypatch.context() as one:
            one.setattr(torch.cpu, name, lambda: True)
            assert machine.multiplies(torch.bfloat16)
