"""Makes a basis from a sample of passages: principal components, and bits for each by dynamic programming.

KVTC (2511.01815) joins all layers and heads in a single transform. Here all heads of a layer share a transform, with as
many neighbouring layers as have at most 256 features together: restoring a number costs a product with every component
of its group, and the basis needs no more tokens than a first ingestion has. On the bundled model, whose layers have 256
features, a single transform of all four layers gains 1 % of the bytes; in SmolLM2-135M's shape five layers together
decode 2.4 times as slowly. Keys and values have separate transforms.
1. Features are centred, and scaled by the deviation of their layer and head, so that layers with larger numbers do not
dominate. Their principal components come from three quarters of the sample. 2. A component of deviation s may have 0
to 7 bits: with b bits its codes are s * 8 / 2^b apart. On the last quarter, which the components have not
seen, each choice has a mean squared error and a rate, the entropy of its codes. 3. Dynamic programming finds the
choices with the least error within a budget of bits (`allot`). 4. The last quarter is encoded; the budget is
corrected until the bytes meet the target.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ragcache.errors import BasisError, check_least
from ragcache.kv.block import KVBlock, MixedBlock
from ragcache.kv.sparse_block import SparseBlock
from ragcache.lazy_torch import Tensor, torch
from ragcache_papers import kvtc_transform
from ragcache_papers.frames import pack_frames

Floats = NDArray[np.float64]
RATIO = 20.0
SPARSE_RATIO = 10.0
"""Half the ratio, if each head holds its own tokens: then a head's numbers say little about other heads' numbers."""
FEATURES = 256
# Least tokens for each feature: with fewer, components follow the sample's noise.
LEAST_TOKENS = 2
CHOICES = range(8)  # bits
_WIDTH_OF = (0, 2, 4, 4, 8, 8, 8, 8)  # bits that a code is packed in
# A token whose squared error is this many times the mean is kept exact.
OUTLIER = 16.0
STATES = 4096
BANDS = 256
_CORRECTIONS = 3
_PASSAGE_TOKENS = 256


def fit_basis(blocks: Sequence[KVBlock], ratio: float | None = None, features: int = FEATURES) -> KVBlock:
    """Return the basis of these passages' blocks, which come from the same model.

    ratio:    bytes in bfloat16 over the bytes of the tokens not kept exact; None: `usual_ratio`
    features: of a group at most, unless a single layer has more

    Raises BasisError if there are too few tokens, ConfigError.
    """
    first = next(iter(blocks), None)
    if isinstance(first, MixedBlock):
        parts = zip(*(block.parts for block in blocks if isinstance(block, MixedBlock)), strict=True)
        return MixedBlock(_same_rows([fit_basis(own, ratio, features) for own in parts]), first.part_of)
    is_sparse = isinstance(first, SparseBlock)
    ratio = usual_ratio(is_sparse) if ratio is None else ratio
    check_least("ratio", ratio, 1)
    keys = [block.keys[:, :, kvtc_transform.FIRST_TOKENS :] for block in blocks]
    values = [block.values[:, :, kvtc_transform.FIRST_TOKENS :] for block in blocks]
    return _block(_fit(keys, ratio, features, is_sparse), _fit(values, ratio, features, is_sparse))


def usual_ratio(is_sparse: bool) -> float:
    """Return the default ratio. is_sparse: each head of a block holds its own tokens (KVzip)"""
    return SPARSE_RATIO if is_sparse else RATIO


def stand_in(example: KVBlock) -> KVBlock:
    """Return a basis of only the example's means and deviations, for blocks like it.

    Its components are cosines, three bits for every second, or for all if each head holds its own tokens. It takes the
    bytes and the time of a real basis, and finds no structure.
    """
    if isinstance(example, MixedBlock):
        return MixedBlock(_same_rows([stand_in(part) for part in example.parts]), example.part_of)
    every = 1 if isinstance(example, SparseBlock) else 2
    return _block(_cosines(example.keys, every), _cosines(example.values, every))


def allot(rates: Floats, errors: Floats, budget: float) -> NDArray[np.int64]:
    """Return the choice for each component with the least sum of errors whose rates add up to `budget` at most.

    rates, errors: [components, choices]; the first choice has rate 0. Rates are rounded up to parts of the budget, and
    neighbours share a choice if there are more than BANDS components.
    """
    band = -(-len(rates) // BANDS)
    starts = np.arange(0, len(rates), band)
    costs = np.ceil(np.add.reduceat(rates, starts) * (STATES / budget) - 1e-9).astype(np.int64)
    least = np.zeros(STATES + 1)  # the error of all components so far, by states that they may take
    chosen = np.zeros((len(costs), STATES + 1), np.int8)
    for rank, error in enumerate(np.add.reduceat(errors, starts)):
        options = np.full((len(error), STATES + 1), np.inf)
        for choice, cost in enumerate(costs[rank]):
            if cost <= STATES:
                options[choice, cost:] = least[: STATES + 1 - cost] + error[choice]
        chosen[rank], least = options.argmin(0), options.min(0)
    left, found = STATES, np.zeros(len(costs), np.int64)
    for rank in reversed(range(len(costs))):
        found[rank] = chosen[rank, left]
        left -= costs[rank, found[rank]]
    return found.repeat(band)[: len(rates)]


def _fit(numbers: Sequence[Tensor], ratio: float, features: int, is_sparse: bool) -> Tensor:
    """Return a basis's rows for keys or values, float32 [num_layers, heads, rows, channels].

    numbers: of each passage, [num_layers, heads, num_tokens, channels]. Raises BasisError if the tokens are too few.
    """
    layers, heads, _, width = numbers[0].shape if numbers else (1, 1, 0, 1)
    groups = list(layer_groups(layers, heads * width, features))
    tokens, needed = sum(one.shape[2] for one in numbers), LEAST_TOKENS * heads * width * max(map(len, groups))
    if tokens < needed:
        counted = "that each head keeps (KVzip), " if is_sparse else ""
        raise BasisError(
            f"a basis for codec 'kvtc' needs {needed:,} tokens, and there are {tokens:,} {counted}after the first "
            "token of each passage: ingest more passages at once, or use another codec until there are enough"
        )
    made = [_fit_group(torch.cat([_flat(one, own) for one in numbers]), heads, width, ratio) for own in groups]
    return _joined(made, heads, width)


def _fit_group(sample: Tensor, heads: int, width: int, ratio: float) -> Tensor:
    """Return a group's rows, float32 [rows, features], fitted to a sample, float64 [num_tokens, features]."""
    seen, unseen = sample[: len(sample) * 3 // 4], sample[len(sample) * 3 // 4 :]
    mean = seen.mean(0)
    scale = _scale(seen - mean, heads, width)
    scaled = (seen - mean) / scale
    variances, vectors = torch.linalg.eigh(scaled.T @ scaled / len(scaled))
    deviations, directions = variances.clamp(min=0).sqrt().flip(0), vectors.T.flip(0)
    rates, errors = _choices((unseen - mean) / scale @ directions.T, deviations)
    wanted = budget = sample.shape[1] * 16 / ratio
    for _ in range(_CORRECTIONS):
        bits = torch.from_numpy(allot(rates, errors, budget))
        rows = _rows(mean, scale, directions, deviations * 8 / 2**bits, torch.tensor(_WIDTH_OF)[bits])
        group = kvtc_transform.Group(range(sample.shape[1] // (heads * width)), _joined([rows], heads, width))
        codes = group.encode(unseen)
        budget *= wanted / _bits_a_token(group, codes)
    rows[kvtc_transform.LIMIT] = OUTLIER * group.errors(unseen, codes).mean()
    return rows


def _cosines(numbers: Tensor, every: int) -> Tensor:
    layers, heads, tokens, width = numbers.shape
    made = []
    for own in layer_groups(layers, heads * width, FEATURES):
        sample = _flat(numbers, own)
        features = sample.shape[1]
        mean = sample.mean(0) if tokens else torch.zeros(features, dtype=torch.float64)
        ranks = torch.arange(0, features, every, dtype=torch.float64).unsqueeze(1)
        places = (torch.arange(features, dtype=torch.float64) + 0.5) * (math.pi / features)
        directions = torch.cos(ranks * places) * math.sqrt(2 / features)
        directions[0] /= math.sqrt(2)
        steps, widths = torch.full((len(ranks),), 1.5, dtype=torch.float64), torch.full((len(ranks),), 4)
        rows = _rows(mean, _scale(sample - mean, heads, width), directions, steps, widths)
        rows[kvtc_transform.LIMIT] = features
        made.append(rows)
    return _joined(made, heads, width)


def _choices(coefficients: Tensor, deviations: Tensor) -> tuple[Floats, Floats]:
    """Return rates in bits and mean squared errors of each number of bits, [components, choices]."""
    rates, errors = (np.zeros((coefficients.shape[1], len(CHOICES))) for _ in range(2))
    for bits in CHOICES:
        steps = deviations * 8 / 2**bits
        most = kvtc_transform.largest_code(_WIDTH_OF[bits]) if bits else 0
        codes = (coefficients / torch.where(steps > 0, steps, 1)).round_().clamp_(-most, most)
        errors[:, bits] = (coefficients - codes * steps).square().mean(0).numpy()
        rates[:, bits] = _entropies(codes.long()).numpy()
    return rates, errors


def _entropies(codes: Tensor) -> Tensor:
    """Return the bits per code, float64 [components], of [num_tokens, components]."""
    values = 2 * kvtc_transform.largest_code(kvtc_transform.WIDTHS[0]) + 1
    numbered = codes + values // 2 + values * torch.arange(codes.shape[1])
    counts = torch.bincount(numbered.flatten(), minlength=values * codes.shape[1]).view(-1, values)
    shares = counts.double() / len(codes)
    return -torch.xlogy(shares, shares).sum(1) / math.log(2)


def _bits_a_token(group: kvtc_transform.Group, codes: Tensor) -> float:
    stored = sum(pack_frames(group.pack(passage))["stream"].numel() for passage in torch.split(codes, _PASSAGE_TOKENS))
    return 8 * stored / len(codes)


def _rows(mean: Tensor, scale: Tensor, directions: Tensor, steps: Tensor, widths: Tensor) -> Tensor:
    """Return the rows of a group, float32 [rows, features]; its limit is set later.

    directions: float64 [components, features], orthonormal; steps: [components], in scales; widths: 0 for none
    """
    components = directions * steps.unsqueeze(1) * scale
    # Rounding to the grid may increase the reach, by less than this margin.
    grid = kvtc_transform.grid_of(1.01 * kvtc_transform.reach(mean, components, kvtc_transform.levels_of(widths)))
    blank = torch.zeros(1, len(mean), dtype=torch.float64)
    found = [blank, (mean / grid).round().unsqueeze(0) * grid, scale.unsqueeze(0), blank]
    for width in kvtc_transform.WIDTHS:
        own = (components[widths == width] / grid).round() * grid
        found += [own[(own != 0).any(1)], blank]
    return torch.cat(found).float()


def _scale(centred: Tensor, heads: int, width: int) -> Tensor:
    """Return the deviation of each feature's layer and head, rounded to float32; 1 where all numbers are equal."""
    shaped = torch.unflatten(centred, 1, (-1, heads, width))
    found = (
        shaped.square().mean((0, 3), keepdim=True).sqrt() if len(centred) else torch.ones(1, shaped.shape[1], heads, 1)
    )
    found = torch.where(found > 2.0**-100, found, 1).float().double()
    return found.expand(1, -1, -1, width).flatten()


def layer_groups(layers: int, features: int, most: int) -> Iterator[range]:
    """Yield groups of adjacent layers, of nearly equal size, with `most` features at most or a single layer.

    features: number of features of a layer
    """
    count = -(-layers // max(1, most // features))
    for number in range(count):
        yield range(number * layers // count, (number + 1) * layers // count)


def _flat(numbers: Tensor, layers: range) -> Tensor:
    return numbers[layers.start : layers.stop].cpu().permute(2, 0, 1, 3).flatten(1).double()


def _joined(groups: Sequence[Tensor], heads: int, width: int) -> Tensor:
    """Return the rows of all layers, [num_layers, heads, rows, channels], from each group's [rows, features]."""
    shaped = []
    for number, rows in enumerate(groups):
        rows[kvtc_transform.GROUP] = number
        shaped.append(torch.unflatten(rows, 1, (-1, heads, width)).permute(1, 2, 0, 3))
    return torch.cat(_padded(shaped))


def _padded(shaped: Sequence[Tensor]) -> list[Tensor]:
    """Return the rows, filled up with zeros to the longest."""
    most = max(rows.shape[2] for rows in shaped)
    return [torch.nn.functional.pad(rows, (0, 0, 0, most - rows.shape[2])) for rows in shaped]


def _block(keys: Tensor, values: Tensor) -> KVBlock:
    keys, values = _padded([keys, values])
    return KVBlock(keys, values)


def _same_rows(parts: Sequence[KVBlock]) -> list[KVBlock]:
    padded = _padded([rows for part in parts for rows in (part.keys, part.values)])
    return [KVBlock(keys, values) for keys, values in zip(padded[::2], padded[1::2], strict=True)]
