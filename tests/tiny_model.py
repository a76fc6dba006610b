"""A random Llama with a byte-level tokenizer, saved as a Hugging Face directory: loads like any other model."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import ragcache as rc
from ragcache.models.trained_tokens import TrainedTokens

BOS, EOS = "<|bos|>", "<|eos|>"
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
PROMPT = rc.Prompt(IDS[:2], [IDS[2:6], IDS[6:9]], IDS[9:])
LINK = TrainedTokens("link", link_tokens=2, link_slots=3, first_link_id=258, kv_start_id=264, kv_end_id=265)


def last_logits(model: PreTrainedModel) -> Tensor:
    """What plain transformers says behind the prompt."""
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0, -1]


def byte_tokenizer(**more: Any) -> PreTrainedTokenizerFast:
    """Every byte is a token; 258 ids with BOS and EOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, clean_up_tokenization_spaces=False, **more
    )


def bpe_tokenizer(pattern: str, texts: list[str], size: int = 600) -> PreTrainedTokenizerFast:
    """Byte-level BPE, learnt from these texts. pattern: what it cuts a text by before it merges"""
    tokenizer = Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, clean_up_tokenization_spaces=False
    )


def save_tiny_llama(
    directory: Path,
    *,
    seed: int = 0,
    positions: int = 512,
    reuse: TrainedTokens | None = None,
    tokenizer: PreTrainedTokenizerFast | None = None,
    **tokenizer_options: Any,
) -> Path:
    """reuse: state this training in the configuration and grow the vocabulary by its added ids, 258 and following.
    tokenizer: in place of `byte_tokenizer`
    """
    torch.manual_seed(seed)
    tokenizer = tokenizer or byte_tokenizer(**tokenizer_options)
    added = sorted(reuse.added_ids) if reuse else []
    assert added == list(range(258, 258 + len(added)))
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|added-{number}|>" for number in added]})
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=positions,
        initializer_range=0.3,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    if reuse:
        config.ragcache = reuse.section()
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
