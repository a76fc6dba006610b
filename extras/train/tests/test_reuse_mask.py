"""Three masks by the same rule: the papers' words, the dense masks of a CPU, and FlexAttention's on a GPU."""

import random
from dataclasses import replace

import pytest
import reuse_oracle as oracle
import torch
from torch.nn.attention.flex_attention import create_mask

from ragcache.models.trained_tokens import TrainedTokens
from ragcache_train.masked_pass import BLOCK, Visibility
from ragcache_train.train_batches import Ask, EncodedRow, Sample, collate, lay_out

LINK = TrainedTokens("link", "isolated", 2, 8, 50, 90, 91)
COMPOSITE = TrainedTokens("markers", doc_start_id=80, doc_end_id=81, positions="composite")
WINDOWS = (None, 5)


def random_parts(seed: int) -> tuple[list[int], list[list[int]], list[list[int]]]:
    rng = random.Random(seed)

    def ids(least: int, most: int) -> list[int]:
        return [rng.randrange(100, 200) for _ in range(rng.randint(least, most))]

    return ids(0, 4), [ids(1, 10) for _ in range(rng.randint(0, 5))], [ids(2, 6) for _ in range(rng.randint(1, 3))]


def both(seed: int):
    """Return a random row, laid out by `ragcache_train` and by the oracle."""
    prefix, chunks, questions = random_parts(seed)
    row = EncodedRow("qa", "", prefix, chunks, [Ask(ids[:1], [*ids[1:], 3]) for ids in questions], None, True)
    if seed % 4 == 0:
        return lay_out(row, LINK, False), oracle.together(prefix, chunks, questions)
    spec = (TrainedTokens("reposition"), COMPOSITE, LINK)[seed % 4 - 1]
    return lay_out(row, spec, True), oracle.apart(spec, prefix, chunks, questions)


@pytest.fixture(scope="module")
def drawn():
    return [both(seed) for seed in range(30)]


def visibility_of(layouts, multiple: int = 1) -> Visibility:
    batch = collate(layouts, multiple)
    return Visibility.of(batch, None)


def whole(visibility: Visibility, window: int | None) -> torch.Tensor:
    """Return the rows' masks as a single mask, in which no row sees another."""
    return torch.block_diag(*visibility.masks(window)).bool()


@pytest.mark.parametrize("window", WINDOWS)
def test_the_masks_are_the_papers_for_every_pair(drawn, window):
    masks = visibility_of([layout for layout, _ in drawn], multiple=BLOCK).masks(window)
    for mask, (_, tokens) in zip(masks, drawn, strict=False):
        assert torch.equal(mask, oracle.allowed(tokens, window))
    assert len(masks) == len(drawn) + 1  # the padding is a separate row
    assert all(mask.any(-1).all() for mask in masks)


@pytest.mark.parametrize("window", WINDOWS)
def test_flex_attention_has_the_same_mask(drawn, window):
    visibility = visibility_of([layout for layout, _ in drawn] + long_rows(0), multiple=BLOCK)
    length = len(visibility.segments)
    flex = create_mask(visibility.rule(window), 1, 1, length, length, device="cpu")
    assert torch.equal(flex[0, 0], whole(visibility, window))


def long_rows(seed: int) -> list[Sample]:
    """Return rows of all kinds, with passages that span several blocks or share a block."""
    rng, layouts = random.Random(seed), []
    specs = (LINK, COMPOSITE, TrainedTokens("reposition"))
    behind = (replace(LINK, recipe="prefix"), replace(LINK, recipe="primer"), TrainedTokens("reposition", "primer"))
    for _ in range(4):
        chunks = [[5] * rng.choice((3, 40, 130, 400)) for _ in range(rng.randint(0, 3))]
        asks = [Ask([7] * rng.choice((1, 30, 300)), [8, 3]) for _ in range(rng.randint(1, 2))]
        row = EncodedRow("qa", "", [1] * rng.choice((0, 5, 300)), chunks, asks, None, True)
        layouts.append(lay_out(row, rng.choice(specs), rng.random() < 0.8))
        if chunks and rng.random() < 0.5:
            spec = rng.choice(behind)
            primer = (9,) * rng.choice((20, 200)) if spec.recipe == "primer" else ()
            layouts.append(lay_out(row._replace(primer=primer), spec, True))
    return layouts


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("seed", range(12))
def test_blocks_of_keys_that_are_left_out_hold_nothing_to_see_and_full_ones_all(seed, window):
    visibility = visibility_of(long_rows(seed), multiple=BLOCK)
    blocks, pairs = visibility.blocks(window), whole(visibility, window)
    tiles = pairs.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).transpose(1, 2).flatten(2)
    computed, full = (
        kept(blocks.kv_num_blocks, blocks.kv_indices),
        kept(blocks.full_kv_num_blocks, blocks.full_kv_indices),
    )
    assert not (computed & full).any()
    assert tiles.all(-1)[full].all()
    assert not tiles.any(-1)[~(computed | full)].any()
    idle = (computed & ~tiles.any(-1)).sum() / computed.sum()
    assert idle <= (0.5 if window else 0.1)  # few blocks are kept needlessly


def kept(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return FlexAttention's lists of blocks as bool [blocks, blocks]."""
    pairs = torch.zeros(indices.shape[2:], dtype=torch.bool)
    for query, count in enumerate(counts[0, 0].tolist()):
        pairs[query, indices[0, 0, query, :count].long()] = True
    return pairs


def test_blocks_that_nobody_sees_are_left_out():
    row = EncodedRow("qa", "", [1], [[5] * BLOCK] * 6, [Ask([7], [8, 3])], None, True)
    layout = lay_out(row, TrainedTokens("reposition"), True)
    one, four = (visibility_of([layout] * rows, multiple=BLOCK).blocks(None) for rows in (1, 4))
    assert one.sparsity() > 50  # per cent of the blocks
    assert four.sparsity() > 85


def test_masks_are_made_once_for_each_window(drawn):
    visibility = visibility_of([layout for layout, _ in drawn], multiple=BLOCK)
    assert visibility.dense(None, torch.float32) is visibility.dense(None, torch.float32)
    assert visibility.blocks(None) is visibility.blocks(None)
    dense, windowed = (torch.block_diag(*visibility.dense(window, torch.float32)) for window in (None, 5))
    assert not torch.equal(dense, windowed)


def test_masks_do_not_look_at_what_the_tensors_hold(drawn):
    """Tensors on "meta" have no content to read, so making the masks does not wait for a device."""
    batch = collate([layout for layout, _ in drawn] + long_rows(1), multiple=BLOCK)
    tensors = (batch[name].to("meta") for name in ("segments", "position_ids", "rows"))
    segments, positions, rows = tensors
    visibility = Visibility(segments, positions[0], rows, batch["lengths"])
    for window in WINDOWS:
        assert visibility.blocks(window).kv_indices.is_meta
        assert all(mask.is_meta for mask in visibility.dense(window, torch.float32))
