"""A linear transform of tokens with quantised components, as rows of a block.

Rows replace tokens, for keys and for values, each with a number for every layer, head and channel:

    0       the number of the layer's group; the layers of a group are adjacent and share a transform
    1       the mean
    2       the scale, which is the unit of errors
    3       the limit: the largest sum of squared errors, in scales, that a token of the group may have
    4 ...   components of 8 bits, a row of zeros, those of 4 bits, a row of zeros, those of 2 bits, rows of zeros

A component is a direction times its step: a token is restored as mean + codes @ components. The numbers of a group's
mean and components are multiples of a power of two, and no sum of them exceeds 2^24 times that power: float32 adds them
up without rounding, in any order, and every process, number of threads and device restores the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import groupby

from ragcache.codecs.affine import pack, unpack
from ragcache.errors import DamagedBlockError
from ragcache.lazy_torch import Tensor, torch
from ragcache_papers.frames import read_frame

WIDTHS = (8, 4, 2)  # bits of a component's codes, before entropy coding
FIRST_TOKENS = 1  # of a passage, kept exact: an attention sink is unlike all others, and beyond the limit
GROUP, MEAN, SCALE, LIMIT, FIRST_COMPONENT = range(5)


def largest_code(bits: int) -> int:
    return int(2 ** (bits - 1)) - 1


class Group:
    """The transform of some layers. Features are a token's numbers in them: [layers, heads, channels], flattened.

    layers: numbers of its layers
    limit:  largest sum of squared errors, in scales, that a token may have
    counts: number of components of each width
    largest_error: largest error that a number of a token within the limit can have
    reach:  largest absolute value that a restored number can have
    """

    def __init__(self, layers: range, rows: Tensor) -> None:
        """Read a group. rows: float32 [layers, heads, rows, channels], of these layers. Raises DamagedBlockError."""
        flat = rows.permute(2, 0, 1, 3).flatten(1).contiguous()
        ends = (flat[FIRST_COMPONENT:] == 0).all(1).nonzero().flatten().tolist()[: len(WIDTHS)]
        if len(ends) < len(WIDTHS):
            raise DamagedBlockError("a basis does not say where its components of each width end")
        starts = [0, *(end + 1 for end in ends[:-1])]
        of_width = [flat[FIRST_COMPONENT:][start:end] for start, end in zip(starts, ends, strict=True)]
        components = torch.cat(of_width)
        self.layers = layers
        self.limit = float(flat[LIMIT, 0])
        self.counts = [len(own) for own in of_width]
        widths = [bits for bits, count in zip(WIDTHS, self.counts, strict=True) for _ in range(count)]
        self._levels = levels_of(torch.tensor(widths))
        self._scale = flat[SCALE].double()
        self.largest_error = float(self._scale.max()) * math.sqrt(self.limit)
        self.reach = reach(flat[MEAN].double(), components.double(), self._levels)
        grid = grid_of(self.reach)
        if bool((torch.cat([components, flat[MEAN : MEAN + 1]]).double() / grid).frac().any()):
            raise DamagedBlockError("the numbers of a basis are no multiples of one power of two")
        by_head = (len(layers), rows.shape[1], rows.shape[3])
        self._held = {
            torch.device("cpu"): (
                flat[MEAN].reshape(by_head).unsqueeze(2).clone(),
                torch.unflatten(components, 1, by_head).permute(1, 2, 0, 3).contiguous(),
            )
        }

    def features(self, numbers: Tensor) -> Tensor:
        """Return features, float64 [num_tokens, features], of all layers' numbers.

        numbers: [num_layers, heads, num_tokens, channels]
        """
        own = numbers[self.layers.start : self.layers.stop]
        return own.permute(2, 0, 1, 3).flatten(1).double()

    def encode(self, features: Tensor) -> Tensor:
        """Return the codes, int8 [num_tokens, components], that are nearest by least squares in scales."""
        mean, components = self._held[torch.device("cpu")]
        directions = components.permute(2, 0, 1, 3).flatten(1).double() / self._scale
        steps = directions.norm(dim=1, keepdim=True)
        directions /= steps
        scaled = (features - mean.flatten().double()) / self._scale
        # Components of very unlike steps are no longer quite orthogonal after rounding to the grid.
        found: Tensor = (torch.linalg.solve(directions @ directions.T, directions @ scaled.T) / steps).T
        return found.round_().clamp_(-self._levels, self._levels).to(torch.int8)

    def restore(self, codes: Tensor, layer: int, out: Tensor) -> None:
        """Write a layer's numbers into `out`, float32 [heads, num_tokens, channels], without rounding.

        codes: int8 [num_tokens, components], on the device of `out`
        """
        # With a lower precision, float32 products may be rounded to fewer bits and not be exact.
        exact = torch.float32 if torch.get_float32_matmul_precision() == "highest" else torch.float64
        mean, components = (held[layer - self.layers.start].to(exact) for held in self._on(codes.device))
        factors = codes.to(exact).expand(len(out), -1, -1)
        if exact == torch.float32:
            torch.baddbmm(mean, factors, components, out=out)  # into the cache: memory limits the speed, not products
        else:
            out.copy_(torch.baddbmm(mean, factors, components))

    def errors(self, features: Tensor, codes: Tensor) -> Tensor:
        """Return sums of squared errors in scales, float64 [num_tokens]; see `limit`."""
        heads, _, width = self._held[torch.device("cpu")][0][0].shape
        restored = torch.empty(len(self.layers), heads, len(codes), width)
        for layer, out in zip(self.layers, restored, strict=True):
            self.restore(codes, layer, out)
        return ((restored.permute(2, 0, 1, 3).flatten(1) - features) / self._scale).square().sum(1)

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return mean and components on the device.

        Shapes: [layers, heads, 1, channels] and [layers, heads, components, channels].
        """
        if device not in self._held:
            mean, components = self._held[torch.device("cpu")]
            self._held[device] = mean.to(device), components.to(device)
        return self._held[device]

    def pack(self, codes: Tensor) -> Iterator[bytes]:
        """Yield a part for each width: the codes of its components, packed one component after another."""
        for bits, own in zip(WIDTHS, torch.split(codes, self.counts, dim=1), strict=True):
            above = (own.to(torch.int16) + largest_code(bits)).to(torch.uint8)
            yield pack(above, bits).T.contiguous().numpy().tobytes()

    def packed_sizes(self, num_tokens: int) -> list[int]:
        """Return the bytes of each part that `pack` yields."""
        return [count * -(-num_tokens * bits // 8) for bits, count in zip(WIDTHS, self.counts, strict=True)]

    def unpack(self, tensors: Mapping[str, Tensor], first_frame: int, num_tokens: int) -> Tensor:
        """Return the codes from three frames. Raises DamagedBlockError."""
        found, start = torch.empty(sum(self.counts), num_tokens, 1, dtype=torch.uint8), 0
        for rank, size in enumerate(self.packed_sizes(num_tokens)):
            if size:
                bits, count = WIDTHS[rank], self.counts[rank]
                packed = read_frame(tensors, first_frame + rank, size).view(count, -1, 1)
                own = found[start : start + count]
                unpack(packed, bits, own)
                own -= largest_code(bits)  # modulo 256
                start += count
        return found.squeeze(2).view(torch.int8).T


def levels_of(widths: Tensor) -> Tensor:
    """Return the largest code of each width, float64; 0 for width 0."""
    return (2.0 ** (widths.double() - 1) - 1).clamp(min=0)


def reach(mean: Tensor, components: Tensor, levels: Tensor) -> float:
    """Return a bound on all numbers that these restore, and on partial sums. levels: largest codes, by component"""
    return float((mean.abs() + levels @ components.abs()).max())


def grid_of(reach: float) -> float:
    """Return the power of two of which all numbers up to `reach` are at most 2^24 multiples."""
    return 2.0 ** (math.ceil(math.log2(max(reach, 2.0**-100))) - 24)


def groups_of(rows: Tensor) -> tuple[Group, ...]:
    """Return the groups of keys or values, float32 [num_layers, heads, rows, channels]. Raises DamagedBlockError."""
    if rows.dtype != torch.float32 or rows.ndim != 4 or rows.shape[2] <= FIRST_COMPONENT:
        raise DamagedBlockError(f"{rows.dtype} {tuple(rows.shape)} is no basis")
    groups, start = [], 0
    for _, members in groupby(rows[:, 0, GROUP, 0].tolist()):
        layers = range(start, start + len(list(members)))
        groups.append(Group(layers, rows[layers.start : layers.stop]))
        start = layers.stop
    return tuple(groups)
