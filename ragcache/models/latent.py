"""Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): a cache holds a latent and a rotary key per token.

Keys and values of the heads are products of the latent and the weights of a linear layer. Either they are computed
before attention (*expanded*), which costs the same for few rows as for many, or the weights are multiplied into the
queries and the outputs instead (*absorbed*): all heads then attend to a single key, the latent next to the rotary key.
A few rows after many tokens are faster in the absorbed form; `form_of` computes which form is cheaper.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

LATENT = "expand_kv"  # method of transformers' latent attention modules that computes keys and values from latents
ABSORBED = "ragcache_absorbed"
"""Attribute of attention modules whose latents can be attended to as they are: their `Absorbed`."""
_TOKENS = 3  # number of tokens to try


def expand(module: nn.Module, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the keys and values of all heads for a cached pair.

    In a latent layer the pair is (rotary key, latent), and keys and values are computed from it; in any other layer it
    is returned unchanged.
    """
    make: Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]] | None = getattr(type(module), LATENT, None)
    return pair if make is None else make(module, pair[1], pair[0])


class Expanded(NamedTuple):
    """Attention to keys and values of the heads, for any layer."""

    module: nn.Module

    def query(self, query: Tensor) -> Tensor:
        return query

    def held(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return expand(self.module, pair)

    def output(self, out: Tensor) -> Tensor:
        return out


class Absorbed(NamedTuple):
    """Attention to latents.

    keys:   weights that make the keys' part without rotation, [num_heads, width, rank]
    values: weights that make values, [num_heads, value_dim, rank]
    rotary: width of the rotary key
    """

    keys: Tensor
    values: Tensor
    rotary: int

    def query(self, query: Tensor) -> Tensor:
        width = self.keys.shape[1]
        return torch.cat([query[..., :width] @ self.keys, query[..., width:]], dim=-1)

    def held(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys and values of equal width, for a single kernel; `output` drops the values' rotary part."""
        both = torch.cat([pair[1], pair[0]], dim=-1)
        return both, both

    def output(self, out: Tensor) -> Tensor:
        return out[..., : self.values.shape[2]] @ self.values.transpose(1, 2)

    def pays(self, num_rows: int) -> bool:
        """Return whether this form is cheaper for `num_rows` rows.

        Attention to latents costs more for each row, because they are wider, but saves computing keys and values.
        """
        (_, width, rank), value_dim = self.keys.shape, self.values.shape[1]
        wider = 2 * (rank + self.rotary) - (width + self.rotary + value_dim)
        return num_rows * wider < rank * (width + value_dim)


def form_of(module: nn.Module, num_rows: int) -> Expanded | Absorbed:
    """Return the cheaper form for this number of rows."""
    absorbed: Absorbed | None = getattr(module, ABSORBED, None)
    return absorbed if absorbed is not None and absorbed.pays(num_rows) else Expanded(module)


@torch.inference_mode()
def absorbed_of(module: nn.Module, rotary: int, rank: int) -> Absorbed | None:
    """Return the absorbed form of an attention that makes keys and values by a linear layer; None for other attention.

    rotary, rank: widths of the rotary key and the latent

    The form is tested on random latents: None, too, if it does not give the module's own keys and values.
    """
    linear, width = getattr(module, "kv_b_proj", None), getattr(module, "qk_nope_head_dim", None)
    if not isinstance(linear, nn.Linear) or linear.bias is not None or type(linear.weight) is not nn.Parameter:
        return None
    weight = linear.weight.detach()
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(1, 1, _TOKENS, rank + rotary, generator=generator).to(weight)
    latents, turned = drawn.split([rank, rotary], dim=-1)
    keys, values = expand(module, (turned, latents))
    up_keys, up_values = weight.view(keys.shape[1], -1, rank).split([width, values.shape[3]], dim=1)
    found = Absorbed(up_keys, up_values, rotary)
    whole = torch.cat([latents @ up_keys.transpose(1, 2), turned.expand(-1, keys.shape[1], -1, -1)], dim=-1)
    pairs = ((whole, keys), (found.output(latents.expand(-1, keys.shape[1], -1, -1)), values))
    return found if all(near(ours, theirs, theirs) for ours, theirs in pairs) else None


def near(ours: Tensor, theirs: Tensor, scale: Tensor) -> bool:
    """Return whether two results differ by at most a few roundings of numbers as large as those in `scale`."""
    if ours.shape != theirs.shape:
        return False
    return bool((ours.float() - theirs.float()).norm() <= tolerance(scale.dtype) * scale.float().norm())


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest relative distance that counts as the same.

    A rotation in bfloat16 is up to 0.007 away from float32's, a layer's output up to 0.015 from another kernel's;
    wrong results are away by 0.1 and more.
    """
    return 1e-4 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
