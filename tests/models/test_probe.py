"""What loading asks a model: rounding is no reason to refuse it in any dtype, wrongly moved keys are."""

import os
from functools import cache

import pytest
import torch
from covering import covering
from families import FAMILIES, SMALL, own_directory, saved_tiny
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import ragcache as rc
from ragcache.kv.rope import Angles, Rope
from ragcache.models import attention, support

REAL_MODEL = "RAGCACHE_TEST_MODEL"
DTYPES = ["float32", "bfloat16", "float16"]
SPECIAL_IDS = range(8)
# By family: the massive activation, the weight by which queries and keys see it, the pair of dimensions that does, and
# the number of layers over which rounding adds up.
MASSIVE = {"llama": (20.0, 15.0, (3, 9), 16), "phi3": (20.0, 10.0, (2, 8), 8), "glm4": (100.0, 10.0, (2, 3), 8)}


@cache
def save_massive(family: str) -> str:
    """A model whose special tokens all have one huge activation, as real models' have: scores among them are huge and
    nearly equal, so that their rounding decides who attends to whom, and values do not see it."""
    size, weight, pair, layers = MASSIVE[family]
    kind, extra = FAMILIES[family]
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**SMALL, **extra, "num_hidden_layers": layers, "head_dim": 12})
    model = AutoModelForCausalLM.from_config(config)
    heads = config.num_attention_heads + config.num_key_value_heads
    with torch.no_grad():
        model.get_input_embeddings().weight[SPECIAL_IDS, 0] = size
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight", "qkv_proj.weight")):
                parameter.view(-1, 12, config.hidden_size)[:heads, pair, 0] = weight
            if name.endswith(("v_proj.weight", "qkv_proj.weight")):
                parameter[-12 * config.num_key_value_heads :, 0] = 0
    directory = own_directory(family)
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize(("family", "dtype"), covering(sorted(MASSIVE), DTYPES))
def test_massive_activations_are_no_reason_to_refuse(monkeypatch, family, dtype):
    assert rc.load_lm(save_massive(family), dtype=dtype).shape.num_layers == MASSIVE[family][3]
    ids = torch.tensor([list(SPECIAL_IDS)[1:6]])  # not even where the probe asks these very tokens
    monkeypatch.setattr(support, "_probe_ids", lambda model: (ids, torch.arange(5)[None]))
    assert rc.load_lm(save_massive(family), dtype=dtype).shape.num_layers == MASSIVE[family][3]


def test_the_probe_asks_ordinary_tokens():
    lm = rc.load_lm(saved_tiny("llama"))
    lm.model.config.eos_token_id = [99, 2]
    ids = support._probe_ids(lm.model)[0][0].tolist()
    assert len(set(ids)) == 5
    assert not {0, 1, 2, 99}.intersection(ids)
    assert min(ids) < lm.vocab_size // 4
    assert max(ids) > lm.vocab_size * 3 // 4


def interleaved(width: int) -> torch.Tensor:
    """Where each dimension of halves stands among interleaved pairs."""
    return torch.arange(width).view(2, -1).T.flatten()


def wrong_sign(apply):
    return lambda query, key, cos, sin: apply(query, key, cos, -sin)


def wrong_pairs(apply):
    def rotate(query, key, cos, sin):
        order = interleaved(key.shape[-1])
        moved = apply(query[..., order], key[..., order], cos, sin)
        return tuple(part[..., order.argsort()] for part in moved)

    return rotate


@pytest.mark.parametrize(
    ("family", "wrong", "dtype"),
    covering(sorted(MASSIVE), [wrong_sign, wrong_pairs], DTYPES, together=[(0, 1), (1, 2)]),
)
def test_keys_that_are_rotated_wrongly_are_refused(monkeypatch, family, wrong, dtype):
    honest = support._rotation_function
    monkeypatch.setattr(support, "_rotation_function", lambda *given: wrong(honest(*given)))
    with pytest.raises(rc.UnsupportedModelError, match=r"layer 0's keys does not give the model's own"):
        rc.load_lm(save_massive(family), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("power", [-1, 1])
def test_keys_that_are_scaled_twice_or_never_are_refused(monkeypatch, power, dtype):
    """YaRN scales cos and sin, by 1.14 in this model."""
    honest = Rope._compute

    def scaled(rope, kind, end):
        cos, sin, half = honest(rope, kind, end)
        factor = kind[0][0].attention_scaling ** power
        return Angles(cos * factor, sin * factor, half)

    monkeypatch.setattr(Rope, "_compute", scaled)
    with pytest.raises(rc.UnsupportedModelError, match="layer 0's keys does not give the model's own"):
        rc.load_lm(saved_tiny("llama-yarn"), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_that_are_scaled_wrongly_are_refused(monkeypatch, dtype):
    honest = attention._attend_encoded

    def wrong(numbers, query, key, value, window, scoring):
        moved = attention.CURRENT.get().rope is not None
        return honest(numbers, query * 2 if moved else query, key, value, window, scoring)

    monkeypatch.setattr(attention, "_attend_encoded", wrong)
    with pytest.raises(rc.UnsupportedModelError, match=r"layer 0's attention .* \(recipe isolated\)"):
        rc.load_lm(saved_tiny("llama"), dtype=dtype)


@pytest.mark.skipif(not os.environ.get(REAL_MODEL), reason=f"{REAL_MODEL} names no directory with a real model")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_real_model_loads(dtype):
    lm = rc.load_lm(os.environ[REAL_MODEL], dtype=dtype, packed=False)
    assert str(lm.dtype) == f"torch.{dtype}"
