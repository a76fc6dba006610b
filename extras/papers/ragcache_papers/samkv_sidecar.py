"""SamKV's sidecar: statistics of a passage's own encoding about its blocks, kept beside its KV (appendix A)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

from ragcache.codecs.none import RawCodec
from ragcache.errors import DamagedBlockError
from ragcache.kv.block import KVBlock, MixedBlock
from ragcache.lazy_torch import Tensor, torch

if TYPE_CHECKING:
    from ragcache.kv.exact import Exact
    from ragcache.kv.rope import Rope
    from ragcache.models.attention import Attended
    from ragcache.models.language_model import LanguageModel

PAUTA = 3.0  # standard deviations beyond which the PauTa criterion calls a value an outlier
PREFIX = "sidecar."
TINY = 1e-12  # attention below it counts as this much: a logarithm is taken


@dataclass(frozen=True)
class Sizes:
    """How a passage is cut: tokens in a block, and blocks always kept at its beginning and end; see `SamKV`."""

    block_size: int = 16
    initial_blocks: int = 1
    local_blocks: int = 2

    def cut(self, num_tokens: int) -> tuple[int, int]:
        """Return where the middle of a passage begins and ends; a short passage has none."""
        begins = min(num_tokens, self.initial_blocks * self.block_size)
        return begins, max(begins, num_tokens - self.local_blocks * self.block_size)

    def num_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks of the middle; the last may be shorter."""
        begins, ends = self.cut(num_tokens)
        return -(-(ends - begins) // self.block_size)


@dataclass(frozen=True, eq=False)
class Sidecar:
    """SamKV's statistics of a passage before it has read a question, by layer; B: blocks of its middle.

    Vectors are rotated within the passage, its first token at 0, and unscaled. Rotation is linear, so a rotated mean is
    the mean of the rotated vectors: turned to the passage's place, it equals the mean of the tokens' vectors there.

    sizes:       int64 [3]: `Sizes`
    mean_keys:   [num_layers, num_kv_heads, B + 1, head_dim]: of each middle block, and of the initial and local tokens
    local_query: [num_layers, num_heads, head_dim]: mean query of the local tokens
    most, least: int64 [num_layers]: the block of greatest importance and of greatest unimportance (A.1); -1: none
    outliers:    bool [num_layers, num_tokens]: tokens whose own attention is an outlier (A.1)
    stable:      bool [num_layers]: layers whose attention agrees with all others' on the best block (A.2)
    """

    sizes: Tensor
    mean_keys: Tensor
    local_query: Tensor
    most: Tensor
    least: Tensor
    outliers: Tensor
    stable: Tensor

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], block: KVBlock) -> Sidecar:
        """Return the sidecar of the block. Raises DamagedBlockError if it belongs to another block."""
        if tensors.keys() != {one.name for one in fields(cls)}:
            raise DamagedBlockError(f"the tensors {sorted(tensors)} are no sidecar of SamKV")
        found, layers, count = cls(**tensors), block.num_layers, block.num_tokens
        sizes = Sizes(*found.sizes.tolist()) if found.sizes.shape == (3,) and bool((found.sizes > 0).all()) else None
        wanted = {"most": (layers,), "least": (layers,), "outliers": (layers, count), "stable": (layers,)}
        fits = all(tuple(tensors[name].shape) == shape for name, shape in wanted.items())
        if sizes is None or not fits or found.mean_keys.dim() != 4 or len(found.local_query) != layers:
            raise DamagedBlockError("the sidecar beside a block is of another block")
        heads = block.layers[0].num_kv_heads
        if tuple(found.mean_keys.shape[:3]) != (layers, heads, sizes.num_blocks(count) + 1):
            raise DamagedBlockError("the sidecar beside a block has keys of other blocks")
        return found

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def map(self, change: Callable[[Tensor], Tensor]) -> Sidecar:
        return Sidecar(**{name: change(tensor) for name, tensor in self.tensors.items()})


class SurveyedBlock(MixedBlock):
    """A block with its sidecar."""

    def __init__(self, kv: KVBlock, sidecar: Sidecar) -> None:
        super().__init__([kv], [0] * kv.num_layers, kv.recipe)
        self.kv = kv
        self.sidecar = sidecar
        self.codec = SamKVCodec()

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self.sidecar.num_bytes

    def map(self, change: Callable[[Tensor], Tensor]) -> KVBlock:
        return SurveyedBlock(self.kv.map(change), self.sidecar.map(change))


class SamKVCodec(RawCodec):
    """Unchanged blocks, with their sidecars in the same file: both are written, moved, checked and deleted together.

    Blocks that a cluster makes have no sidecar, nor have blocks after a lone BOS and blocks of models that keep
    latents, have recurrent layers, or layers of several shapes.
    """

    name: ClassVar[str] = "samkv"
    sizes: ClassVar[Sizes] = Sizes()

    def beside(self, lm: object, ids: Sequence[int], block: KVBlock, prefix: Exact | None) -> KVBlock:
        from ragcache.models.language_model import LanguageModel

        if not isinstance(lm, LanguageModel) or lm.shape.latent or lm.shape.states or isinstance(block, MixedBlock):
            return block
        if block.recipe is None or block.recipe.bos:  # the BOS before it is not among the ids
            return block
        return survey(lm, ids, block, prefix, self.sizes)

    def encode(self, block: KVBlock) -> dict[str, Tensor]:
        if not isinstance(block, SurveyedBlock):
            return super().encode(block)
        own = {f"{PREFIX}{name}": tensor for name, tensor in block.sidecar.tensors.items()}
        return {**super().encode(block.kv), **own}

    def decode(self, tensors: Mapping[str, Tensor]) -> KVBlock:
        own = {name.removeprefix(PREFIX): one for name, one in tensors.items() if name.startswith(PREFIX)}
        kv = super().decode({name: one for name, one in tensors.items() if not name.startswith(PREFIX)})
        return SurveyedBlock(kv, Sidecar.of(own, kv)) if own else kv


def survey(
    lm: LanguageModel, row: Sequence[int], block: KVBlock, prefix: Exact | None = None, sizes: Sizes | None = None
) -> KVBlock:
    """Return the block with its sidecar, from an additional pass over the passage: its attention and its queries.

    row:    the ids that the block was encoded from, with the ids before them that it leaves out
    prefix: the KV before the row
    """
    from ragcache.kv.exact import place_exact
    from ragcache.models.attention import observing

    if not row or not block.num_tokens:
        return block
    first = 0 if prefix is None else prefix.num_tokens
    watch = _Watch(lm.rope, sizes or SamKVCodec.sizes, first + len(row) - block.num_tokens, block)
    cache = lm.new_cache(first + len(row))
    if prefix is not None:
        with torch.inference_mode():  # as all passes over pooled buffers
            for layer in range(lm.shape.num_layers):
                place_exact(cache, layer, prefix)
    with observing(watch):
        lm.run(row, first, cache)
    cache.release()
    return SurveyedBlock(block, watch.sidecar())


class _Watch:
    """Observer that collects a sidecar's statistics in each layer of a pass over the passage.

    start: position of the passage's first token in that pass
    """

    def __init__(self, rope: Rope, sizes: Sizes, start: int, block: KVBlock) -> None:
        self._rope, self._sizes, self._start, self._block = rope, sizes, start, block
        self._begins, self._ends = sizes.cut(block.num_tokens)
        self._keys: list[Tensor] = []
        self._queries: list[Tensor] = []
        self._found: list[Importance] = []

    def __call__(self, attended: Attended) -> None:
        layer, count = attended.layer, self._block.num_tokens
        local = attended.query[0, :, -count:][:, self._ends :]
        self._queries.append(self._turned_back(local, layer, self._start).mean(1))
        self._keys.append(self._mean_keys(layer))
        weights = attended.weights(count).flatten(0, 1)[:, :, -count:].mean(0)
        self._found.append(importance(weights, self._begins, self._ends, self._sizes.block_size))

    def sidecar(self) -> Sidecar:
        found, device = self._found, self._block.layer_keys(0).device
        return Sidecar(
            torch.tensor([self._sizes.block_size, self._sizes.initial_blocks, self._sizes.local_blocks]),
            torch.stack(self._keys).to(device),
            torch.stack(self._queries).to(device, self._block.dtype),
            torch.tensor([one.most for one in found]),
            torch.tensor([one.least for one in found]),
            torch.stack([one.outliers for one in found]).to(device),
            stable_layers([one.alphas for one in found]),
        ).map(lambda tensor: tensor.to(device))

    def _mean_keys(self, layer: int) -> Tensor:
        keys = self._block.layer_keys(layer)
        turned = torch.empty(keys.shape, dtype=torch.float32, device=self._rope.device)
        self._rope.rotate(keys.to(turned), layer, 0, out=turned)
        turned = self._turned_back(turned, layer, 0)
        parts = torch.split(turned[:, self._begins : self._ends], self._sizes.block_size, 1)
        ends = torch.cat([turned[:, : self._begins], turned[:, self._ends :]], 1).mean(1)
        means = [part.mean(1) for part in parts if part.shape[1]]
        return torch.stack([*means, ends], 1).to(keys.dtype)

    def _turned_back(self, rotated: Tensor, layer: int, by: int) -> Tensor:
        """Return the vectors as they would be `by` positions earlier, and unscaled: float32."""
        places = torch.full(rotated.shape[1:2], by, device=rotated.device)
        exact = rotated.float()
        return self._rope.unrotate(exact, layer, places, torch.empty_like(exact))


@dataclass(frozen=True, eq=False)
class Importance:
    """Importance of a passage's middle blocks, from the attention of a layer (A.1).

    alphas:   float32 [B]: how fast the attention falls that a block's best token gets from the tokens after it; the
              smaller, the more important the block
    most, least: the block of the smallest alpha, and the block whose best token gets the least attention; -1: no blocks
    outliers: bool [num_tokens]: best tokens whose alpha is an outlier among the blocks', at the important end
    """

    alphas: Tensor
    most: int
    least: int
    outliers: Tensor


def importance(weights: Tensor, begins: int, ends: int, block_size: int) -> Importance:
    """Return the importance of a passage's blocks in a layer.

    weights: attention, float32 [num_tokens, num_tokens], by query and key, mean over the heads
    begins, ends: first token of the passage's middle, and the first after it
    """
    count = weights.shape[0]
    outliers = torch.zeros(count, dtype=torch.bool, device=weights.device)
    if begins == ends:
        return Importance(weights.new_empty(0), -1, -1, outliers)
    tokens = torch.arange(begins, ends, device=weights.device)
    behind = count - 1 - tokens  # number of tokens after each token
    steps = torch.arange(1, count, device=weights.device)
    rows = (tokens[:, None] + steps).clamp_max(count - 1)
    curves = torch.where(steps <= behind[:, None], weights[rows, tokens[:, None]], 0.0)
    sustained = curves.sum(1) / behind.clamp_min(1)
    padded = torch.nn.functional.pad(sustained, (0, -len(tokens) % block_size), value=-1.0)
    blocks = padded.view(-1, block_size)
    best = blocks.argmax(1) + block_size * torch.arange(len(blocks), device=weights.device)
    alphas = decay(curves[best], behind[best])
    outliers[tokens[best[stand_out(alphas)]]] = True
    return Importance(alphas, int(alphas.argmin()), int(sustained[best].argmin()), outliers)


def stand_out(alphas: Tensor) -> Tensor:
    """Return which alphas are outliers by the PauTa criterion, at the important end: bool [B]."""
    return alphas < alphas.mean() - PAUTA * alphas.std(correction=0)


def stable_layers(alphas: Sequence[Tensor]) -> Tensor:
    """Return the layers in which the block that ranks best over all layers is an outlier (A.2): bool [num_layers].

    alphas: by layer
    """
    if not alphas[0].numel():
        return torch.zeros(len(alphas), dtype=torch.bool)
    ranks = torch.stack([one.argsort().argsort() for one in alphas]).double().mean(0)
    best = int(ranks.argmin())
    return torch.tensor([bool(stand_out(one)[best]) for one in alphas])


def decay(curves: Tensor, counts: Tensor) -> Tensor:
    """Return exponents alpha of y = c x^-alpha, by least squares over the logarithms: [tokens].

    curves: [tokens, most]: attention that a token gets from the x-th token after it; counts: int64, the number of these
    """
    x = torch.arange(1, curves.shape[1] + 1, device=curves.device).log().expand_as(curves)
    y = curves.clamp_min(TINY).log()
    there = torch.arange(curves.shape[1], device=curves.device) < counts[:, None]
    number = there.sum(1, keepdim=True).clamp_min(1)
    x, y = (torch.where(there, part - (part * there).sum(1, keepdim=True) / number, 0.0) for part in (x, y))
    spread = x.square().sum(1)
    return torch.where(spread > 0, -(x * y).sum(1) / spread.clamp_min(TINY), 0.0)
