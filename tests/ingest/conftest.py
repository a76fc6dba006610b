import os

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# Read by huggingface_hub at import: no test may reach for the network.
os.environ["HF_HUB_OFFLINE"] = "1"

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


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer()
