"""Tiny GGUF files of three families, and stores over them."""

from pathlib import Path

import pytest
import torch
from gguf_files import BOS, EOS, TOKENS, write
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen2Config

import ragcache as rc
from ragcache.models.trained_tokens import KV_END, KV_START, LINK_NAME
from ragcache_demo.bag_of_words import BagOfWords

pytest.importorskip("gguf")
SIZES = {
    "vocab_size": len(TOKENS) + 1,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": None,
}
SLIDING = {"tie_word_embeddings": True, "query_pre_attn_scalar": 32, "sliding_window": 64, "num_hidden_layers": 6}
# transformers adds a token of this name to a vocabulary that lacks it.
VOCABULARY = {"tokenizer.ggml.tokens": [*TOKENS, "<|endoftext|>"], "tokenizer.ggml.token_type": [1] * 257 + [3] * 4}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 512}
FAMILIES = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "gemma3": (Gemma3TextConfig, SLIDING),
    "yarn": (LlamaConfig, {}),
    "wide": (LlamaConfig, {"head_dim": 64}),
    "linked": (LlamaConfig, {"vocab_size": len(TOKENS) + 1 + 8}),
}
LINKS = [LINK_NAME.format(slot, place) for slot in (1, 2, 3) for place in (1, 2)]
LINKED = {
    "tokenizer.ggml.tokens": [*VOCABULARY["tokenizer.ggml.tokens"], *LINKS, KV_START, KV_END],
    "tokenizer.ggml.token_type": [*VOCABULARY["tokenizer.ggml.token_type"], *[3] * 8],
}
OWN = {"yarn": VOCABULARY | YARN, "linked": VOCABULARY | LINKED}
FACTS = {
    "clubs": "The rowing club of Kelbrook meets on Monday.",
    "mills": "The old mill of Thornton was sold in 1904.",
    "roads": "The road from Barnoldswick to Colne is closed.",
}


def write_family(directory: Path, family: str) -> Path:
    kind, own = FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**SIZES | own)).eval()
    return write(directory / f"{family}.gguf", model, OWN.get(family, VOCABULARY))


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("gguf")
    return {family: write_family(directory, family) for family in FAMILIES}


@pytest.fixture
def open_llama(tmp_path, files):
    """Return a function that opens a store with three documents, whose model llama.cpp runs."""
    pytest.importorskip("llama_cpp", reason="engine llama.cpp needs llama-cpp-python, which is built from source")
    opened = []

    def open_store(name="kb", **options):
        given = {"model": files["llama"], "engine": "llama.cpp:threads=1", "embedder": BagOfWords(), **options}
        kb = rc.RagCache.open(tmp_path / name, **given)
        opened.append(kb)
        if not kb.documents() and not kb.config.read_only:
            kb.ingest([rc.Document(id, text) for id, text in FACTS.items()])
        return kb

    yield open_store
    for kb in opened:
        kb.close()
