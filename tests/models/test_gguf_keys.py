"""Each key of a GGUF file that changes what its model computes or where it ends is honoured, or refused by name."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from covering import few
from gguf_files import BOS, EOS, EOT, TOKENS, llama_cpp_logits, write
from kit.makers import made_by

import ragcache as rc
from ragcache.errors import UnsupportedModelError
from ragcache.models import gguf_tokenizer
from ragcache.models.card import eos_token_ids
from ragcache.models.checkpoint import load_config

pytest.importorskip("gguf")
IDS = [7 * place % 256 for place in range(150)]
SIZES = {
    "vocab_size": len(TOKENS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
FAMILIES = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen3": (transformers.Qwen3Config, {}),
    "qwen2moe": (transformers.Qwen2MoeConfig, EXPERTS | {"shared_expert_intermediate_size": 24}),
    "qwen3moe": (transformers.Qwen3MoeConfig, EXPERTS | {"norm_topk_prob": True}),
    "gemma2": (
        transformers.Gemma2Config,
        {"tie_word_embeddings": True, "query_pre_attn_scalar": 8, "sliding_window": 2048},
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {"tie_word_embeddings": True, "query_pre_attn_scalar": 8, "sliding_window": 16, "num_hidden_layers": 6},
    ),
    "phi3": (transformers.Phi3Config, {}),
}


@pytest.fixture(autouse=True)
def _no_copies(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))


def make(family: str, settings: dict[str, Any] | None = None) -> transformers.PreTrainedModel:
    kind, own = FAMILIES[family]
    torch.manual_seed(0)
    config = kind(**SIZES | own | (settings or {}))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                weights += 0.2 * torch.randn_like(weights)
    return model


def logits(model: transformers.PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0, -1]


def rope(**settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4} | settings}


def divisors(config: dict[str, Any]) -> np.ndarray:
    """What llama.cpp's converter writes as rope_freqs.weight."""
    scaled = make("llama", config).model.rotary_emb.inv_freq
    return (make("llama", rope()).model.rotary_emb.inv_freq / scaled).numpy()


class Honoured(NamedTuple):
    """settings: transformers' for the model that a file with these keys holds; other: whether they change its logits

    by_llama_cpp: whether llama.cpp reads the key too
    """

    family: str
    keys: dict[str, Any]
    settings: dict[str, Any]
    other: bool = True
    by_llama_cpp: bool = True


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
OF_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
HONOURED = {
    "plain": Honoured("llama", {}, {}, other=False),
    "base": Honoured("llama", {"rope.freq_base": 5e5}, rope(rope_theta=5e5)),
    "no base": Honoured("llama", {"rope.freq_base": None}, rope(), other=False),
    "linear": Honoured(
        "llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, rope(rope_type="linear", factor=4.0)
    ),
    "no type": Honoured("llama", {"rope.scaling.factor": 4.0}, rope(rope_type="linear", factor=4.0)),
    "old factor": Honoured("llama", {"rope.scale_linear": 4.0}, rope(rope_type="linear", factor=4.0)),
    "no scaling": Honoured("llama", {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {}, other=False),
    "yarn": Honoured("llama", YARN | {"rope.scaling.finetuned": True}, rope(**OF_YARN)),
    "yarn's factor": Honoured(
        "llama",
        YARN | {"rope.scaling.attn_factor": 1.2},
        rope(**OF_YARN, attention_factor=1.2 * (0.1 * np.log(4.0) + 1)),
    ),
    "yarn's betas": Honoured(
        "llama",
        YARN | {"rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_beta_slow": 2.0},
        rope(**OF_YARN, beta_fast=8.0, beta_slow=2.0),
        by_llama_cpp=False,
    ),
    "epsilon": Honoured("llama", {"attention.layer_norm_rms_epsilon": 0.5}, {"rms_norm_eps": 0.5}),
    "width": Honoured("qwen3", {}, {"head_dim": 16}),
    "heads": Honoured("llama", {}, {"num_key_value_heads": 4}),
    "feed-forward": Honoured("llama", {}, {"intermediate_size": 64}),
    "tied": Honoured("llama", {}, {"tie_word_embeddings": True}),
    "biases": Honoured("llama", {}, {"attention_bias": True}),
    "experts": Honoured("qwen3moe", {"expert_used_count": 1}, {"num_experts_per_tok": 1}),
    "shared expert": Honoured(
        "qwen2moe", {"expert_shared_feed_forward_length": 40}, {"shared_expert_intermediate_size": 40}
    ),
    "caps": Honoured(
        "gemma2",
        {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "window": Honoured("gemma2", {"attention.sliding_window": 16}, {"sliding_window": 16}),
    "width's scale": Honoured("gemma2", {}, {"head_dim": 16, "query_pre_attn_scalar": 16}),
    "window and base": Honoured(
        "gemma3",
        {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base": 1e5, "rope.freq_base_swa": 5e3},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
            }
        },
    ),
    "pattern": Honoured(
        "gemma3",
        {"attention.sliding_window_pattern": [True, False] * 3},
        {"layer_types": ["sliding_attention", "full_attention"] * 3},
    ),
    "part of a head": Honoured(
        "phi3",
        {"attention.sliding_window": 0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
}


OFTEN = ["base", "linear", "yarn", "tied", "experts", "caps", "window and base", "part of a head"]


@pytest.mark.parametrize("case", few(OFTEN, [case for case in HONOURED if case not in OFTEN]))
def test_a_key_is_honoured(case, tmp_path):
    family, keys, settings, other, by_llama_cpp = HONOURED[case]
    truth = make(family, settings)
    path = write(tmp_path / "model.gguf", truth, keys)
    check(path, truth, by_llama_cpp)
    if other:
        assert (logits(make(family)) - logits(truth)).abs().max() > 1e-2


def check(path: Path, truth: transformers.PreTrainedModel, by_llama_cpp: bool = True) -> None:
    right = logits(truth)
    fused = rc.fuse(rc.load_lm(path), rc.Prompt(IDS[:2], [], IDS[2:]), method="full")
    torch.testing.assert_close(fused.next_logits, right, atol=1e-4, rtol=1e-4)
    if by_llama_cpp:
        torch.testing.assert_close(llama_cpp_logits(path, IDS), right, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_frequencies_of_llama_3_are_honoured(factor, tmp_path):
    settings = rope(rope_type="llama3", factor=factor, **LLAMA3)
    truth = make("llama", settings)
    path = write(tmp_path / "model.gguf", truth, tensors={"rope_freqs.weight": divisors(settings)})
    assert (logits(make("llama")) - logits(truth)).abs().max() > 1e-2
    check(path, truth)


def test_other_frequencies_are_refused(tmp_path):
    path = write(tmp_path / "model.gguf", make("llama"), tensors={"rope_freqs.weight": np.linspace(1, 3, 4)})
    with pytest.raises(
        UnsupportedModelError, match=r"model\.gguf is not supported: rope_freqs\.weight: its frequencies"
    ):
        rc.load_lm(path)


REFUSED: dict[str, Any] = {
    "attention.causal": False,
    "attention.clamp_kqv": 8.0,
    "attention.max_alibi_bias": 8.0,
    "attention.scale": 0.5,
    "attention.sliding_window": 16,
    "attention.sliding_window_pattern": 2,
    "attention.temperature_scale": 0.1,
    "attention.value_length": 16,
    "attn_logit_softcapping": 30.0,
    "embedding_scale": 2.0,
    "expert_count": 4,
    "expert_gating_func": 2,
    "expert_group_count": 2,
    "expert_group_used_count": 2,
    "expert_shared_feed_forward_length": 48,
    "expert_used_count": 2,
    "expert_weights_norm": True,
    "expert_weights_scale": 2.5,
    "feed_forward_length": [48, 64],
    "final_logit_softcapping": 30.0,
    "full_attention_interval": 4,
    "logit_scale": 2.0,
    "nextn_predict_layers": 1,
    "pooling_type": 1,
    "residual_scale": 2.0,
    "rope.dimension_count": 4,
    "rope.dimension_sections": [2, 1, 1],
    "rope.freq_base_swa": 5e3,
    "rope.scaling.attn_factor": 1.2,
    "rope.scaling.type": "longrope",
    "rope.scaling.yarn_log_multiplier": 0.1,
    "shortconv.l_cache": 3,
    "ssm.state_size": 16,
    "use_parallel_residual": True,
    "general.type": "adapter",
    "split.count": 2,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.add_eos_token": True,
    "tokenizer.ggml.add_sep_token": True,
    "tokenizer.ggml.model": "bert",
    "tokenizer.ggml.normalizer.lowercase": True,
    "tokenizer.ggml.pre": "kimi-k2",
    "tokenizer.ggml.suppress_tokens": [3],
    "tokenizer.ggml.tokens": TOKENS[:-1],
}
BESIDE = {"tokenizer.ggml.add_bos_token": {"tokenizer.ggml.bos_token_id": None}}


llama = made_by(make, "llama")


@pytest.mark.parametrize("key", REFUSED)
def test_a_key_that_cannot_be_honoured_is_refused_by_name(key, llama, tmp_path):
    path = write(tmp_path / "model.gguf", llama, {key: REFUSED[key]} | BESIDE.get(key, {}))
    name = key if key.split(".")[0] in ("tokenizer", "general", "split") else f"llama.{key}"
    with pytest.raises(UnsupportedModelError, match=f"model.gguf is not supported: {name}"):
        load_config(str(path), path)


@pytest.mark.parametrize("name", ["rope_factors_long.weight", "blk.0.attn_sinks.weight", "blk.1.attn_q_norm.weight"])
def test_a_tensor_that_no_parameter_takes_is_refused_by_name(name, llama, tmp_path):
    path = write(tmp_path / "model.gguf", llama, tensors={name: np.ones(4)})
    with pytest.raises(UnsupportedModelError, match=f"model.gguf is not supported: {name}"):
        rc.load_lm(path)


HARMLESS = {
    "general.name": "mistral of somebody",
    "general.sampling.temp": 0.7,
    "vendor.quantized_by": "somebody",
    "tokenizer.ggml.fim_pre_token_id": 3,
    "tensor_data_layout": "Meta AI original pth",
    "vocab_size": 100,
    "rope.scaling.finetuned": False,
    "attention.sliding_window": 4096,
    "attention.scale": 8**-0.5,
    "attention.causal": True,
    "expert_count": 0,
    "final_logit_softcapping": 0.0,
}


def test_keys_that_change_nothing_are_taken(llama, tmp_path):
    check(write(tmp_path / "model.gguf", llama, HARMLESS), llama, by_llama_cpp=False)


# Where answers end, and how text becomes tokens.


@pytest.mark.parametrize("kept", [True, False])
def test_an_answer_ends_at_each_token_that_the_file_names(kept, llama, tmp_path, monkeypatch):
    if kept:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write(tmp_path / "model.gguf", llama, {"tokenizer.ggml.eot_token_id": EOT, "tokenizer.ggml.eom_token_id": 7})
    assert eos_token_ids(rc.load_lm(path)) == (7, EOS, EOT)


TEXTS = ["In  1931 ab, 12345; x=~~y\n\n  don't stop", "a  b\t\tc 1 22 333", "(x)+`y` 1234 été"]


@pytest.mark.parametrize("name", [*gguf_tokenizer.SPLITS, "llama-bpe", "qwen2", "gpt-4o"])
def test_text_is_split_as_llama_cpp_splits_it(name, llama, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama.cpp's tokens need llama-cpp-python")
    tokens = [*TOKENS[:-3], "ĠĠ", "12", "123", "==", "Ġ1", "22", ")+", "~~", "'t", "ĊĊ", *TOKENS[-3:]]
    merges = ["a b", "Ġ Ġ", "1 2", "12 3", "= =", "Ġ 1", "2 2", ") +", "~ ~", "' t", "Ċ Ċ"]
    keys = {"pre": name, "tokens": tokens, "token_type": [1] * (len(tokens) - 3) + [3] * 3, "merges": merges}
    keys |= {"bos_token_id": len(tokens) - 3, "eos_token_id": len(tokens) - 2}
    model = make("llama", {"vocab_size": len(tokens)})
    path = write(tmp_path / "model.gguf", model, {f"tokenizer.ggml.{key}": value for key, value in keys.items()})
    tokenizer = rc.load_lm(path).tokenizer
    plain = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert ids == plain.tokenize(text.encode(), add_bos=False, special=False), (name, text)


def test_digits_are_split_as_the_file_says(llama, tmp_path):
    pieces = {}
    for name in ("smollm", "gpt-2"):
        lm = rc.load_lm(write(tmp_path / f"{name}.gguf", llama, {"tokenizer.ggml.pre": name}))
        pieces[name] = [piece for piece, _ in lm.tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("in 1931")]
    assert pieces == {"smollm": ["in", "Ġ", "1", "9", "3", "1"], "gpt-2": ["in", "Ġ1931"]}


@pytest.mark.parametrize(
    ("template", "begins", "bos"),
    [(None, False, None), (None, True, "<|bos|>"), (None, None, "<|bos|>"), ("{{ bos_token }}", False, "<|bos|>")],
)
def test_raw_text_begins_with_a_token_only_where_the_file_says(template, begins, bos, llama, tmp_path):
    keys = {"tokenizer.chat_template": template, "tokenizer.ggml.add_bos_token": begins}
    assert rc.load_lm(write(tmp_path / "model.gguf", llama, keys)).tokenizer.bos_token == bos


@pytest.mark.parametrize("space", [True, False])
def test_a_space_begins_sentencepiece_text_only_where_the_file_says(space, tmp_path):
    letters = ["▁", "a", "b", "▁a", "▁b"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    keys = {
        "model": "llama",
        "pre": None,
        "tokens": tokens,
        "scores": [0.0] * 259 + [-5.0, -6.0, -7.0, -1.0, -2.0],
        "token_type": [2, 3, 3, *[6] * 256, *[1] * 5],
        "merges": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_space_prefix": space,
    }
    model = make("llama", {"vocab_size": len(tokens)})
    path = write(tmp_path / "model.gguf", model, {f"tokenizer.ggml.{key}": value for key, value in keys.items()})
    ids = rc.load_lm(path).tokenizer("a b", add_special_tokens=False).input_ids
    assert [tokens[id] for id in ids] == (["▁a", "▁b"] if space else ["a", "▁b"])
