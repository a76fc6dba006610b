"""An adapter: LoRA's matrices and embedding rows of added ids, in a small directory next to an unchanged base model.

    adapter.json          the base, the properties it must have, the added tokens, and the section "ragcache" of the
                          model's configuration
    adapter_config.json, adapter_model.safetensors   matrices and rows, in peft's own files
    tokenizer files       the base's, with the added tokens

The matrices are merged into the base's weights (version 2), or act on passages alone (version 3). To load them by peft,
first resize the base's embedding to hold the added ids.

`ragcache train --lora-rank` writes an adapter. `load_lm` loads it as a model: the base with a resized embedding, the
trained rows, the section in its configuration, and the matrices. Fingerprint, block keys and methods then treat it like
any other model.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ragcache.errors import AdapterError
from ragcache.models.hub import ADAPTER
from ragcache.models.lora import DELTA, LORA_FILE, ROOT, Lora
from ragcache.models.trained_tokens import SECTION, TrainedTokens, grown

MERGED, ON_PASSAGES = VERSIONS = (2, 3)


@dataclass(frozen=True)
class Base:
    """The model that an adapter belongs to.

    name:       bundled name, absolute path or hub id
    checkpoint: digest of its weights and configuration (`models/checkpoint_digest.py`)
    num_layers, hidden_size, vocab_size: from its configuration
    num_tokens: number of tokens of its tokenizer, with the added tokens; 0: it has no tokenizer

    Raises ValueError for a field of another type.
    """

    name: str
    checkpoint: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_tokens: int

    def __post_init__(self) -> None:
        """Raise ValueError for a field of another type."""
        for name, kind in get_type_hints(type(self)).items():
            if type(getattr(self, name)) is not kind:
                raise ValueError(f"its {name} is {getattr(self, name)!r}")


@dataclass(frozen=True)
class Adapter:
    """The contents of adapter.json.

    directory: the adapter's directory
    base:      the model that it was trained over
    spec:      the way of reuse that it was trained for
    tokens:    the added tokens by ascending id; empty in the first adapters, which do not state them
    on_passages: whether the matrices act on passages alone
    """

    directory: Path
    base: Base
    spec: TrainedTokens
    tokens: tuple[str, ...] = ()
    on_passages: bool = False

    @classmethod
    def find(cls, where: str | Path) -> Adapter | None:
        """Return the adapter in a directory; None if there is none. Raises AdapterError if it cannot be read."""
        path = Path(where) / ADAPTER
        if not path.is_file():
            return None
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            version, spec = found["version"], found[SECTION]
            if version in VERSIONS:
                base, tokens = Base(**found["base"]), tuple(map(str, found.get("tokens", ())))
                return cls(Path(where), base, TrainedTokens.read(spec), tokens, version == ON_PASSAGES)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _damaged(path, error) from error
        readable = ", ".join(map(str, VERSIONS))
        raise AdapterError(
            f"{path} has version {version!r}, this ragcache reads {readable}; use the ragcache that wrote it, or train "
            "it again with --lora-rank"
        )

    @property
    def added_ids(self) -> list[int]:
        """Return the ids that have trained rows, ascending."""
        return sorted(self.spec.added_ids)

    @property
    def vocab_size(self) -> int:
        """Return the number of rows of the embedding, with those of the added ids."""
        return grown(self.base.vocab_size, self.added_ids)

    def check(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Raise AdapterError for a model other than the base, or a tokenizer other than the adapter's."""
        text = config.get_text_config(decoder=True)
        for part, field, own in (
            ("layers", "num_hidden_layers", self.base.num_layers),
            ("numbers in an embedding row", "hidden_size", self.base.hidden_size),
            ("ids", "vocab_size", self.base.vocab_size),
        ):
            if (found := getattr(text, field)) != own:
                raise AdapterError(
                    f"{self.directory} was trained beside a model with {own} {part} and {self.base.name} has {found}; "
                    f'name its own base in {ADAPTER} under "base", or train an adapter for this one'
                )
        num_tokens = 0 if tokenizer is None else len(tokenizer)
        if num_tokens != self.base.num_tokens:
            raise AdapterError(
                f"{self.directory}: its tokenizer has {num_tokens or 'no'} tokens and the adapter was trained with "
                f"{self.base.num_tokens}; use the tokenizer files that were saved with it"
            )
        for id, token in zip(self.added_ids, self.tokens, strict=False):
            if tokenizer is not None and (held := tokenizer.convert_ids_to_tokens(id)) != token:
                raise AdapterError(
                    f"{self.directory}: id {id} is {held!r} in its tokenizer and {token!r} in the one that it was "
                    "trained with; use the tokenizer files that were saved with it"
                )

    def check_base(self, checkpoint: str | None) -> None:
        """Raise AdapterError if the base's files are not those that the adapter was trained with.

        checkpoint: the `checkpoint_digest` of the base's files; None: there are no such files
        """
        if checkpoint != self.base.checkpoint:
            digests = f"{self.base.checkpoint[:12]}, and these are {(checkpoint or 'nowhere')[:12]}"
            raise AdapterError(
                f"{self.directory} was trained beside other weights than those of {self.base.name}; put the base back "
                f"as it was, or train an adapter for these (it belongs to {digests})"
            )

    def extend(self, config: PreTrainedConfig) -> None:
        """Add the adapter's vocabulary size and section to the base's configuration."""
        config.get_text_config(decoder=True).vocab_size = self.vocab_size
        setattr(config, SECTION, self.spec.section())

    @torch.no_grad()
    def apply(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return the base with the rows in its embedding, and LoRA's matrices in its weights if they act on all tokens.

        New rows of a separate output head are zero, because no answer may contain their ids. New rows of other tables
        (Gemma 4 has one for all layers) are copies of the first row, as in training.

        Raises AdapterError for rows or matrices that are missing or damaged, ConfigError if they need peft and it is
        not installed.
        """
        rows = self.rows()
        old_size = model.get_input_embeddings().weight.shape[0]
        if self.vocab_size > old_size:
            model.resize_token_embeddings(self.vocab_size, mean_resizing=False)
        for table in model.modules():
            if isinstance(table, nn.Embedding) and len(table.weight) == self.vocab_size:
                table.weight[old_size:] = table.weight[0]
        model.get_output_embeddings().weight[old_size:] = 0
        if rows:
            weight: Tensor = model.get_input_embeddings().weight
            weight[list(rows)] = torch.stack(list(rows.values())).to(weight)
        self.extend(model.config)
        if not self.on_passages:
            model = self.lora().merge(model)
        model.requires_grad_(False)
        return model

    def lora(self) -> Lora:
        """Return the matrices. Raises AdapterError if peft's file of them is not there."""
        if (found := Lora.find(self.directory)) is None:
            raise _damaged(self.directory / Lora.FILE, "it is not there")
        return found

    def rows(self) -> dict[int, Tensor]:
        """Load the trained rows of the embedding, float32 [hidden_size] each, by ascending id.

        Raises AdapterError if they are missing or damaged.
        """
        expected = self.added_ids
        if not expected:
            return {}
        path = self.directory / LORA_FILE
        try:
            stated = json.loads((self.directory / Lora.FILE).read_text(encoding="utf-8"))
            ((embedding, ids),) = stated["trainable_token_indices"].items()
            rows = load_file(path)[f"{ROOT}{embedding}{DELTA}"]
        except (OSError, KeyError, ValueError, TypeError, AttributeError, SafetensorError) as error:
            raise _damaged(path, error) from error
        if ids != expected or rows.shape != (len(expected), self.base.hidden_size) or not rows.isfinite().all():
            raise _damaged(path, f"it does not hold one row for each of {len(expected)} ids")
        return dict(zip(ids, rows.float(), strict=True))


def write_adapter(
    out: Path,
    base: Base,
    spec: TrainedTokens,
    tokenizer: PreTrainedTokenizerBase | None = None,
    on_passages: bool = False,
) -> None:
    """Write adapter.json, which makes a directory with peft's files an adapter.

    tokenizer: the base's, with the added tokens; None: no tokens are stated
    on_passages: whether the matrices act on passages alone
    """
    content: dict[str, Any] = {"version": ON_PASSAGES if on_passages else MERGED, "base": asdict(base)}
    content[SECTION] = spec.section()
    if tokenizer is not None:
        content["tokens"] = tokenizer.convert_ids_to_tokens(sorted(spec.added_ids))
    (out / ADAPTER).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _damaged(path: Path, reason: Exception | str) -> AdapterError:
    return AdapterError(f"{path} is missing or damaged ({reason}); get the adapter again")
