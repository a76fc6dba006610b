"""LoRA by peft: low-rank matrices beside every linear layer, and the rows of new tokens, trained.

The matrices act on every token, or on passages' tokens alone (`PassageGate`). The result is an adapter, or the whole
model with the matrices in its weights.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ragcache.errors import ConfigError
from ragcache.models.adapter import Adapter, Base, write_adapter
from ragcache.models.language_model import LanguageModel
from ragcache.models.lora import DOWN, LORA_FILE, UP, damaged_lora, read_matrices
from ragcache.models.named import NAMED
from ragcache.models.trained_tokens import TrainedTokens
from ragcache_train.train_options import LORA_ON


def add_lora(
    model: PreTrainedModel,
    spec: TrainedTokens,
    rank: int,
    alpha: float | None,
    earlier: Adapter | None = None,
    mixed: bool = False,
    on_passages: bool = False,
) -> nn.Module:
    """Return the model with LoRA's matrices. Matrices and rows are float32, whatever the model's weights are.

    alpha: scale of the matrices' product, over the rank; None: twice the rank

    earlier: the adapter whose matrices are trained further; the embedding has its rows already
    mixed:   whether passes use mixed precision, which casts the operands of products
    on_passages: whether the matrices act on passages' tokens alone

    Raises ConfigError if peft is not installed, or the earlier adapter has another rank or acts on other tokens,
    AdapterError if the earlier adapter is damaged.
    """
    try:
        from peft import LoraConfig, get_peft_model
        from peft.tuners.trainable_tokens import TrainableTokensLayer
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError as error:
        raise ConfigError("LoRA needs peft; install ragcache-kv[train]") from error
    if earlier is not None and earlier.on_passages != on_passages:
        acts, wanted = (LORA_ON[on] for on in (earlier.on_passages, on_passages))
        raise ConfigError(
            f"lora_on is {wanted!r} and the matrices of {earlier.directory} were trained with {acts!r}; train with "
            f"lora_on={acts!r}, or from its base, {earlier.base.name}"
        )
    alpha = 2 * rank if alpha is None else alpha
    embedding = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
    added = sorted(spec.added_ids)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # peft takes any number
        target_modules="all-linear",
        trainable_token_indices={embedding: added} if added else None,
    )
    adapted: nn.Module = get_peft_model(model, config)
    if earlier is not None:
        _load_matrices(adapted, earlier, rank, alpha)
    for layer in adapted.modules():
        own: Any = layer
        if isinstance(layer, TrainableTokensLayer):
            # peft makes a tensor of the ids anew in every pass, and its copy to a GPU waits for all that runs there.
            ids = torch.tensor(layer.token_indices["default"], device=own.base_layer.weight.device)
            own.get_merged_weights = partial(_rows_in_place, layer, ids)
        elif isinstance(layer, BaseTunerLayer) and mixed:
            own.cast_input_dtype_enabled = False  # a cast to float32, which mixed precision casts to 16 bits again
    if on_passages:
        PassageGate().add_to(adapted)
    return adapted


class PassageGate:
    """Lets LoRA's matrices act on the tokens of passages that are read apart; all others run the base's weights.

    Inference does the same (`ragcache/models/lora.py`). Which tokens these are is stated by each pass's `Visibility`.
    """

    _acts: Tensor

    def add_to(self, adapted: nn.Module) -> None:
        adapted.register_forward_pre_hook(self._begin, with_kwargs=True)
        for name, module in adapted.named_modules():
            if name.endswith("lora_B.default"):
                module.register_forward_hook(self._limit)

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._acts = kwargs["visibility"].apart[None, :, None]

    def _limit(self, matrix: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output * self._acts


def _rows_in_place(layer: Any, ids: Tensor, adapters: Sequence[str]) -> Tensor:
    """Return the embedding's weight with the trained rows at `ids`."""
    weight: Tensor = layer.base_layer.weight
    return weight.index_copy(0, ids, layer.trainable_tokens_delta["default"].to(weight.dtype))


def _load_matrices(adapted: nn.Module, earlier: Adapter, rank: int, alpha: float) -> None:
    """Load the matrices only: the embedding has the rows already, and their ids may have changed.

    If the earlier adapter has another alpha, both matrices of a product are scaled alike, so that the product stays the
    same. Products that it lacks start anew: a shrunk adapter (`tools/shrink_adapter.py`) leaves out those that are 0.

    Raises ConfigError if it has another rank, AdapterError if it is damaged.
    """
    own, scale, pairs = read_matrices(earlier.directory)
    if own != rank:
        raise ConfigError(
            f"lora_rank is {rank} and {earlier.directory}, from which training goes on, has {own}; train with "
            f"lora_rank={own}, or from its base, {earlier.base.name}"
        )
    try:
        share = math.sqrt(scale / (alpha / rank))
        named = {
            f"{name}{end.replace('.weight', '.default.weight')}": matrix.float() * share
            for name, pair in pairs.items()
            for end, matrix in zip((DOWN, UP), pair, strict=True)
        }
        if unknown := adapted.load_state_dict(named, strict=False).unexpected_keys:
            raise ValueError(f"{unknown[0]} has no place in {earlier.base.name}")
    except (ValueError, RuntimeError) as error:
        raise damaged_lora(earlier.directory, error) from error


def save_lora(
    lm: LanguageModel,
    model: Any,
    base: Base,
    spec: TrainedTokens,
    dtype: torch.dtype,
    on_passages: bool,
    out: Path,
) -> None:
    """Write an adapter: matrices in `dtype` and rows in float32 as peft writes them, adapter.json, the tokenizer."""
    from peft import get_peft_model_state_dict

    held = get_peft_model_state_dict(model, save_embedding_layers=False)
    tensors = {
        name: tensor.detach().to("cpu", dtype if ".lora_" in name else torch.float32).contiguous()
        for name, tensor in held.items()
    }
    save_file(tensors, out / LORA_FILE, {"format": "pt"})
    config = model.peft_config["default"]
    config.base_model_name_or_path = (NAMED[base.name].hub if base.name in NAMED else None) or base.name
    config.inference_mode = True
    config.save_pretrained(out)
    lm.tokenizer.save_pretrained(out)
    write_adapter(out, base, spec, lm.tokenizer, on_passages)


def merge_lora(model: Any) -> Any:
    """Return the model with its adapter merged into its weights; a model without an adapter is unchanged."""
    return model.merge_and_unload() if hasattr(model, "merge_and_unload") else model


@contextmanager
def known_warnings_ignored() -> Iterator[None]:
    """Ignore a warning of peft's at every checkpoint: it saves a grown vocabulary's embeddings, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Setting `save_embedding_layers`")
        yield
