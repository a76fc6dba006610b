"""Self-study: a cartridge is trained on conversations that the model has with itself about chunks of the corpus.

Cartridges (arXiv 2506.06266), section 4: the model asks about a chunk, prompted by a seed of one of five kinds, and
answers over that chunk in full prefill. The student reads the conversation after the cartridge, the teacher after the
chunk, and the loss is the divergence of the two over all its tokens (context distillation).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ragcache.errors import ConfigError, UnsupportedModelError
from ragcache.ingest.chunk_tokenizer import ChunkTokenizer
from ragcache.models.language_model import LanguageModel
from ragcache.prompt import encode_text
from ragcache_train.cartridge import SUFFIX, CartridgeKV, corpus_digest
from ragcache_train.frozen import FrozenBase
from ragcache_train.own_answers import INSTRUCTION
from ragcache_train.row_encoder import passage_text
from ragcache_train.train_batches import Draw, EncodedRow, Pair, lay_out
from ragcache_train.train_rows import MAX_LINE_BYTES, DataRow

SEEDS = {
    "structuring": "Write one instruction to put facts of the text above into a structured form, such as a list, a "
    "table or JSON. Name the facts and the form. Reply with the instruction alone.",
    "summarization": "Write one instruction to summarize a part of the text above. Name the part. Reply with the "
    "instruction alone.",
    "question": INSTRUCTION,
    "use case": "Think of a task that somebody could solve with the text above. Write what they would ask. Reply with "
    "their question alone.",
    "creative": "Write one creative question or request about the text above. Reply with it alone.",
}
"""What makes the model ask, by the paper's kinds; the words are ours."""
FILE = f"cartridge{SUFFIX}"


def read_corpus(path: str | Path) -> str:
    """Return the corpus's text. Raises ConfigError for a file that is unreadable, too large, not UTF-8, or empty."""
    try:
        if Path(path).stat().st_size > MAX_LINE_BYTES:
            raise ConfigError(f"{path} is longer than {MAX_LINE_BYTES >> 20} MiB; a cartridge stands for less text")
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); give a file of text in UTF-8") from error
    if not text.strip():
        raise ConfigError(f"{path} is empty; give the text that the cartridge is to stand for")
    return text


def study_rows(lm: LanguageModel, corpus: str | Path, *, rows: int, study_tokens: int, seed: int) -> list[DataRow]:
    """So many chunks of the corpus, each beginning at another token; fewer where it has fewer."""
    ids = encode_text(lm.tokenizer, read_corpus(corpus))
    places = range(max(1, len(ids) - study_tokens + 1))
    starts = random.Random(f"corpus/{seed}").sample(places, min(rows, len(places)))
    texts = [lm.tokenizer.decode(ids[start : start + study_tokens]) for start in starts]
    return [
        DataRow("qa", f"{corpus}: token {start + 1}", passages=(text,), shuffle=False)
        for start, text in zip(starts, texts, strict=True)
        if text.strip()
    ]


class CartridgeModel(FrozenBase):
    """A model that stays as it is, and the KV in front of all that it reads.

    layers: keys and values of each, [1, num_kv_heads, p, head_dim], that training begins with

    The KV of all tokens but the first is its only parameter: the first is the attention sink, without which training is
    unstable (section 3.2), and stays.
    """

    def __init__(self, base: PreTrainedModel, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().__init__(base)
        flat = [one.float().clone() for pair in layers for one in pair]
        self._first = [one[:, :, :1] for one in flat]
        self.rest = nn.ParameterList([nn.Parameter(one[:, :, 1:].contiguous()) for one in flat])

    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """Return the current keys and values of each layer, [1, num_kv_heads, p, head_dim]."""
        flat = [torch.cat(pair, dim=2) for pair in zip(self._first, self.rest, strict=True)]
        return list(zip(flat[::2], flat[1::2], strict=True))

    def forward(self, **more: Any) -> Any:
        more["visibility"].memory = self.layers()
        return self.base(**more)


def begin_cartridge(lm: LanguageModel, row: EncodedRow, corpus: str | Path, num_tokens: int) -> CartridgeKV:
    """Return the KV that training begins with: the model's KV of the prompt's beginning and the corpus's first tokens.

    row: any row of the corpus, for the prompt's beginning

    Raises ConfigError for a corpus of fewer tokens, or a beginning of at least as many, UnsupportedModelError for
    layers without their own keys and values.
    """
    if lm.shape.states or lm.shape.num_layers != lm.config.get_text_config(decoder=True).num_hidden_layers:
        raise UnsupportedModelError(
            f"{lm.name} has layers without keys and values of their own; a cartridge needs them"
        )
    text, prefix = read_corpus(corpus), tuple(row.prefix)
    ids = (*prefix, *ChunkTokenizer(lm.tokenizer).encode([passage_text(text)])[0])
    if not len(prefix) < num_tokens <= len(ids):
        raise ConfigError(
            f"cartridge_tokens is {num_tokens}; the prompt's beginning has {len(prefix)} tokens, and {len(ids)} with "
            f"{corpus}: choose a number between these"
        )
    context = lm.read(ids[:num_tokens])
    layers = [context.layer_state(layer)[:2] for layer in range(lm.shape.num_layers)]
    path = Path(corpus).resolve()
    return CartridgeKV(
        str(lm.name), lm.fingerprint, str(path), corpus_digest(path), len(prefix), ids[:num_tokens], layers
    )


class DrawnConversations:
    """A data set for torch's DataLoader: from a Draw to the conversation as student and teacher read it."""

    def __init__(self, rows: Sequence[EncodedRow], num_tokens: int) -> None:
        self.rows, self.num_tokens = (
            [row._replace(asks=[ask.learned for ask in row.asks]) for row in rows],
            num_tokens,
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, draw: Draw) -> Pair:
        row = self.rows[draw.row]
        student = lay_out(row._replace(prefix=(), chunks=()), None, False)
        student.positions = [position + self.num_tokens for position in student.positions]
        return Pair(student, lay_out(row, None, False))


def save_cartridge(model: CartridgeModel, begun: CartridgeKV, dtype: torch.dtype, out: Path) -> None:
    layers = [
        (keys[0].detach().to("cpu", dtype), values[0].detach().to("cpu", dtype)) for keys, values in model.layers()
    ]
    replace(begun, layers=layers).write(out / FILE)
