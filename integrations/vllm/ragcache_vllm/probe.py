"""Test of the placing kernel. It is used only if it writes to vLLM's pages what is written without a kernel."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from ragcache.errors import first_line
from ragcache.fusion.layout import Span
from ragcache.fusion.place_check import AT, CODECS, TOKENS, check_close, random_block
from ragcache.kv.cache_shape import CacheShape, LayerShape
from ragcache.kv.rope import Rope
from ragcache_vllm.host_kernel import HostKernel
from ragcache_vllm.placing import WITHOUT, Opened, PagedLayer, Placing, Shard, kernel_on
from ragcache_vllm.plan import Load, Stretch

log = logging.getLogger("vllm.ragcache")


def is_kernel_right(
    layers: Sequence[PagedLayer], rope: Rope, shard: Shard, page_tokens: int, dtype: torch.dtype
) -> bool:
    """Return whether the kernel runs here and fills pages as placing without a kernel does. A failure is logged.

    layers: the layers of this worker; their pages are not in use yet
    dtype:  data type in which vLLM's backend takes keys and values
    """
    kernel = kernel_on(layers[0].device)
    if kernel is None:
        return False
    try:
        angles = [rope.angles(paged.index, 0, 1) for paged in layers]
        if any(one is not None and one.half is None for one in angles):
            raise ArithmeticError("this family does not pair the halves of a key")
        if (held := layers[0].pages[0].dtype) != dtype:
            raise ArithmeticError(f"pages hold {held}, not {dtype}")
        load = _probe_load(layers[0], page_tokens)
        shape = CacheShape(_block_layers(layers, len(rope.sources), shard.num_ranks), dtype, layers[0].device)
        for codec in HostKernel.codecs if kernel is HostKernel else CODECS:
            blocks = {one.key: random_block(shape, codec, one.tokens.num_tokens + one.offset) for one in load.stretches}
            ours, plain = (
                Placing([Opened(load, blocks)], rope, shard, page_tokens, by_kernel=by) for by in (True, False)
            )
            if not ours.is_by_kernel:
                raise ArithmeticError(f"{codec} blocks cannot be read by their addresses")
            for paged in layers:
                both = (_written(one, paged, dtype) for one in (ours, plain))
                for name, *pair in zip(("keys", "values"), *both, strict=True):
                    check_close(f"{name} of layer {paged.index} from {codec}", *pair)
    except Exception as error:
        log.warning("%s: %s: %s", WITHOUT, type(error).__name__, first_line(error))
        return False
    log.info("stored blocks are placed by one kernel a layer")
    return True


def _probe_load(paged: PagedLayer, page_tokens: int) -> Load:
    """Return a load of parts of two blocks on the last pages. Raises ArithmeticError if there are too few pages."""
    end = AT + sum(TOKENS)
    spans = [Span(AT, AT + TOKENS[0]), Span(AT + TOKENS[0], end)]
    num_pages = paged.pages[0].shape[1] * paged.pages[0].shape[2] // page_tokens
    page_ids = [num_pages - 1 - rank for rank in range(-(-end // page_tokens))]
    if page_ids[-1] < 0:
        raise ArithmeticError(f"{num_pages} pages are too few to try it")
    stretches = [Stretch("first", spans[0], 0), Stretch("second", spans[1], TOKENS[1])]
    return Load("probe", stretches, page_ids, [], end, False)


def _block_layers(layers: Sequence[PagedLayer], num_layers: int, num_ranks: int) -> tuple[LayerShape, ...]:
    """Return the shape of a token in each layer of a whole block; layers of other stages are taken to be like the
    first here.
    """
    pages = {paged.index: paged.pages for paged in layers}
    found = [pages.get(index, pages[layers[0].index]) for index in range(num_layers)]
    return tuple(LayerShape(keys.shape[0] * num_ranks, keys.shape[3], values.shape[3]) for keys, values in found)


@torch.inference_mode()
def _written(placing: Placing, paged: PagedLayer, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the keys and values that are written to the layer's pages, and restore the pages."""
    views = paged.pages
    page, row = placing.slots // views[0].shape[2], placing.slots % views[0].shape[2]
    before = [view[:, page, row] for view in views]
    for view in views:
        view[:, page, row] = torch.nan
    placing.place(paged, dtype)
    after = tuple(view[:, page, row] for view in views)
    for view, held in zip(views, before, strict=True):
        view[:, page, row] = held
    return after
