"""First tokens by family: one small run, and configurations that are what they say."""

from pathlib import Path

import pytest

from benchmarks import families


@pytest.mark.slow
def test_a_run_has_a_ratio_and_bytes_of_each_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 99}
    for name in ("Qwen3 0.6B", "DeepSeek V2 Lite"):
        kind, sizes = families.FAMILIES[name]
        monkeypatch.setitem(families.FAMILIES, name, (kind, {**sizes, **small}))
    sizes = ["--passages", "2", "--tokens", "5", "--rounds", "1"]
    found = families.main(["--families", "Qwen3 0.6B,DeepSeek V2 Lite", *sizes, "--out", str(tmp_path)])
    assert set(found.ratios) == {f"{name}: reposition / {families.FULL}" for name in ("Qwen3 0.6B", "DeepSeek V2 Lite")}
    per_layer = {name.split(":")[0]: value for name, value in found.figures.items()}
    assert per_layer["Qwen3 0.6B"] == 5 * 2 * 8 * 128 * 4  # keys and values of 8 heads, float32
    assert per_layer["DeepSeek V2 Lite"] == 5 * (512 + 64) * 4  # the latent and the rotary key
    assert list(tmp_path.glob("families-*.json"))


@pytest.mark.parametrize("name", families.FAMILIES)
def test_every_family_is_one_that_transformers_has(name: str) -> None:
    config = families.config_of(name)
    assert config.num_hidden_layers == families.LAYERS
    assert config.hidden_size > 1000
