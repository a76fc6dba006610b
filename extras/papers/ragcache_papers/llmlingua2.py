"""Passages without their least telling words: LLMLingua-2 (Pan et al., arXiv 2403.12968), before they are encoded.

A token classifier gives every word the probability that it has to stay; the words above a percentile do. The language
model reads what is left, so that KV, its bytes and its loading shrink by as much; the store keeps the whole text, for
search, for sources and for another share later.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from ragcache.errors import ConfigError, ModelNotFoundError, first_line
from ragcache.models.checkpoint import refuse_own_code
from ragcache.models.checkpoint_digest import checkpoint_digest
from ragcache.models.deadline import LIMIT
from ragcache.models.hub import refuse_absent
from ragcache.runtime import team_ends

if TYPE_CHECKING:
    from torch import Tensor

PRESERVE = 1  # the label of a word that stays, where the model's configuration names none
LONGEST = 512  # tokens that a classifier reads at once, where it does not say
BATCH = 8


class Word(NamedTuple):
    """text[start:end], its tokens in the classifier, and the probability that it has to stay: the mean of theirs."""

    start: int
    end: int
    tokens: int
    probability: float


class Compressor:
    """Leaves out words. Thread-safe, and sent to other processes by its name.

    model: directory or hub id of a token classifier, such as
           microsoft/llmlingua-2-bert-base-multilingual-cased-meetingbank
    keep:  share of the classifier's tokens that stay, above 0 and at most 1
    """

    def __init__(self, model: str, keep: float) -> None:
        if not 0 < keep <= 1:
            raise ConfigError(f"keep is {keep}; it is the share of a passage's tokens that stay, above 0 and at most 1")
        self.model = model
        self.keep = keep
        self._loaded: tuple[Any, Any] | None = None
        self._lock = threading.Lock()

    @cached_property
    def identity(self) -> str:
        """What a document's chunks depend on."""
        return f"{self.model if (files := checkpoint_digest(self.model)) is None else files[:16]}, {self.keep}"

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model, "keep": self.keep}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def compress(self, text: str) -> str:
        """The text without its least telling words. White space stays as it was where nothing between was left out.

        Raises ModelNotFoundError for a name that is no token classifier, ConfigError for one without a fast tokenizer.
        """
        if self.keep == 1:
            return text
        words = self.words(text)
        return _joined(text, sorted(_kept(words, self.keep)))

    @team_ends()
    def words(self, text: str) -> list[Word]:
        """The text's words, in order."""
        with self._lock:
            model, tokenizer = self._loaded = self._loaded or _load(self.model)
            windows = _windows(tokenizer, text)
            found: dict[int, list[tuple[int, int, float]]] = {}
            for start in range(0, len(windows), BATCH):
                LIMIT.get().check()
                some = windows[start : start + BATCH]
                for window, row in zip(some, _stay(model, some), strict=True):
                    for word, (first, last), probability in zip(window.words, window.spans, row, strict=True):
                        if word is not None:
                            found.setdefault(word, []).append((first, last, probability))
        return [
            Word(tokens[0][0], tokens[-1][1], len(tokens), sum(one[2] for one in tokens) / len(tokens))
            for _, tokens in sorted(found.items())
        ]


class _Window(NamedTuple):
    """Tokens that are read at once: ids, the number of each one's word (None for special ones), and its characters."""

    ids: list[int]
    words: list[int | None]
    spans: list[tuple[int, int]]


def _load(name: str) -> tuple[Any, Any]:
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    refuse_absent(name, name)
    try:
        model = AutoModelForTokenClassification.from_pretrained(name, trust_remote_code=False).eval()
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        refuse_own_code(name, name, error)
        raise ModelNotFoundError(
            f"cannot load a token classifier under {name!r}: {first_line(error)}; give a directory or hub id, such as "
            "microsoft/llmlingua-2-bert-base-multilingual-cased-meetingbank"
        ) from error
    if not tokenizer.is_fast:
        raise ConfigError(f"{name}: its tokenizer is not a fast one, and does not say where words are")
    return model, tokenizer


def _windows(tokenizer: Any, text: str) -> list[_Window]:
    most = min(LONGEST, tokenizer.model_max_length)
    encoded = tokenizer(
        text,
        truncation=True,
        max_length=most,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        return_attention_mask=False,
    )
    rows = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    return [_Window(ids, encoded.word_ids(number), spans) for number, (ids, spans) in enumerate(rows)]


def _stay(model: Any, windows: Sequence[_Window]) -> list[list[float]]:
    """Probability of staying, of every token."""
    import torch

    width = max(len(window.ids) for window in windows)
    ids = torch.zeros(len(windows), width, dtype=torch.int64)
    mask = torch.zeros(len(windows), width, dtype=torch.int64)
    for row, window in enumerate(windows):
        ids[row, : len(window.ids)] = torch.tensor(window.ids)
        mask[row, : len(window.ids)] = 1
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, attention_mask=mask).logits
    rows: list[list[float]] = logits.float().softmax(-1)[..., _label(model)].tolist()
    return [row[: len(window.ids)] for row, window in zip(rows, windows, strict=True)]


def _label(model: Any) -> int:
    labels = {str(name).lower(): int(number) for name, number in (model.config.label2id or {}).items()}
    return labels.get("preserve", PRESERVE)


def _kept(words: Sequence[Word], keep: float) -> Iterator[Word]:
    """The likeliest words, until their tokens are the share; of equals the earlier ones."""
    left = keep * sum(word.tokens for word in words)
    for word in sorted(words, key=lambda word: -word.probability):
        if left <= 0:
            return
        left -= word.tokens
        yield word


def _joined(text: str, words: Sequence[Word]) -> str:
    """The words with what stood between them; one space or line break where others were left out."""
    found = []
    done = 0
    for word in words:
        gap = text[done : word.start]
        if gap.strip():
            gap = "\n" if "\n" in gap else " " if any(map(str.isspace, gap)) else ""
        found += [gap, text[word.start : word.end]]
        done = word.end
    return "".join(found).strip()
