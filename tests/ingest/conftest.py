from pathlib import Path

import pytest
import torch
from kit.ingestion import Kit
from kit.makers import made_by
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ragcache.models.language_model import LanguageModel
from ragcache.models.load import load_lm

CORPUS = """# Tolvik

Tolvik is a town on the river Alna. It was founded in 1823 by Anna Berg, who had come from Osby. The Rowing Club of
Tolvik meets at the old mill. Dr. J. K. Holm was its first president, e.g. in 1901 and 1902.

```python
def club(town: str) -> list[str]:
    return [name for name in REGISTRY if name.endswith(town)]
```

- The bridge was built in 1799.
- The lake is 12.5 km long; nobody has crossed it since.
"""


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 400 ids with a control token, trained on a page of text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([CORPUS] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", clean_up_tokenization_spaces=False)


@pytest.fixture
def write(tmp_path):
    """Writes a file of this name for a reader; returns its path."""

    def write(name: str, data: str | bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        return path

    return write


tokenizer = made_by(train_tokenizer, scope="session")


@pytest.fixture(scope="session")
def lm_directory(tokenizer, tmp_path_factory) -> Path:
    """A random Llama of a few thousand parameters with that tokenizer, as a directory."""
    path = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=512, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def lm(lm_directory) -> LanguageModel:
    return load_lm(lm_directory)


@pytest.fixture
def kit(tmp_path, lm):
    with Kit(tmp_path / "kb", lm) as opened:
        yield opened
