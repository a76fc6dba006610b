"""Real English and a tokenizer for it, without a network: Python's own help topics."""

from __future__ import annotations

from collections.abc import Iterable
from pydoc_data.topics import topics

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ragcache.ingest.document import Document


def documents(tokenizer: PreTrainedTokenizerFast, num_tokens: int) -> list[Document]:
    """Return help topics, longest first, until they have `num_tokens` tokens; the last is cut."""
    taken: list[Document] = []
    left = num_tokens
    for name, text in sorted(topics.items(), key=lambda item: (-len(item[1]), item[0])):
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) > left:
            text = str(tokenizer.decode(ids[:left]))
        taken.append(Document(id=name, text=text, title=name))
        left -= len(ids)
        if left <= 0:
            break
    return taken


def train_tokenizer(texts: Iterable[str] | None = None, vocab_size: int = 16384) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of these texts (None: the help topics), with a real model's tokens per word."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(topics.values() if texts is None else texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", clean_up_tokenization_spaces=False)
