"""The tokenizer of a GGUF file: rules for its keys, the splitting of text, and the tokens that end answers.

Keys that transformers reads itself have the rule `ignored`.
"""

from __future__ import annotations

from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from ragcache.models.gguf_header import Header
from ragcache.models.gguf_rules import RefusalError, Rule, only


def _tokens(header: Header, config: PreTrainedConfig, value: int) -> None:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is not None and value != embedding.shape[0]:
        raise RefusalError(f"token_embd.weight has {embedding.shape[0]} rows")


def _pre_tokenizer(header: Header, config: PreTrainedConfig, value: str) -> None:
    if header.keys.get("tokenizer.ggml.model") == "gpt2" and value not in {*SPLITS, *_splits_of_transformers()}:
        raise RefusalError("text would be split otherwise than the model was trained")


def _begins(header: Header, config: PreTrainedConfig, value: bool) -> None:
    if value and "tokenizer.ggml.bos_token_id" not in header.keys:
        raise RefusalError("the file names no such token")


TOKENIZER_TABLE: dict[str, Rule] = {
    "ggml.model": only("gpt2", "llama", "gemma4", "t5", "none", "no_vocab"),
    "ggml.pre": _pre_tokenizer,
    "ggml.tokens": _tokens,
    "ggml.add_bos_token": _begins,
    "ggml.add_eos_token": only(False),
    "ggml.add_sep_token": only(False),
    "ggml.suppress_tokens": only([]),
    "ggml.normalizer.lowercase": only(False),
    "ggml.normalizer.strip_accents": only(False),
    "rwkv.world": only(),
}
"""Key of the tokenizer -> rule. Others are harmless, or read by transformers or by `amend_tokenizer`."""


def end_ids(header: Header) -> list[int]:
    """Return the ids that end an answer: those of the end of text, of a turn, and of a message to a tool."""
    ids = (header.keys.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(int(id) for id in ids if id is not None))


WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"  # GPT-2's
SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", WORDS, r"\p{N}+", "[0-9][0-9][0-9]"),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", WORDS, "[0-9][0-9][0-9]"),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"), (r"\p{N}", WORDS)
    ),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "gigachat", "a.x-4.0", "mellum"), ()
    ),
}
"""Name of a pre-tokenizer -> llama.cpp's patterns, applied in order. Empty: GPT-2's words, as in transformers."""


WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
"""Pre-tokenizers under which a piece that is in the vocabulary becomes a single token, without applying merges."""


def _splits_of_transformers() -> frozenset[str]:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    return frozenset(GGUF_PRE_TOKENIZER_SPLITS)


def amend_tokenizer(tokenizer: Tokenizer, header: Header) -> None:
    """Make a tokenizer that transformers read from a GGUF file split and begin text as the file states."""
    keys, backend = header.keys, tokenizer.backend_tokenizer
    if keys["tokenizer.ggml.model"] == "gpt2":
        pre = keys.get("tokenizer.ggml.pre", "default")
        if patterns := SPLITS.get(pre):
            splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
            bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_alone])
        backend.model.ignore_merges = pre in WHOLE_WORDS
    elif keys.get("tokenizer.ggml.add_space_prefix") is False and isinstance(
        backend.pre_tokenizer, pre_tokenizers.Metaspace
    ):
        backend.pre_tokenizer.prepend_scheme = "never"
    # A template places the token itself; raw text begins with it if the tokenizer has one.
    if keys.get("tokenizer.ggml.add_bos_token") is False and "bos_token" not in (tokenizer.chat_template or ""):
        tokenizer.bos_token = None
