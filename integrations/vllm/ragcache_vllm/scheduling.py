"""The connector in vLLM's scheduler: it decides which tokens of a request are loaded, and names its KV in vLLM's cache.

vLLM's prefix cache hashes tokens, not how their KV was made. A request with a layout therefore gets its own name space
there (`cache_salt`): its KV is approximate, and a later plain request over the same tokens must never hit it.

Nothing here reads a block. Blocks are verified by threads before a load is promised; a request with missing or damaged
blocks becomes an ordinary request, which vLLM computes exactly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from ragcache.errors import LayoutError, MissingBlockError
from ragcache_vllm.plan import Load, Plan, make_plan
from ragcache_vllm.request_layout import PARAMS, RequestLayout

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

log = logging.getLogger("vllm.ragcache")
VERIFIERS = 4
KNOWN_S = 0.001
"""Seconds that a call waits for the verification of a request's blocks: enough if their files were verified before, and
less than a step without work takes."""


@dataclass
class Loads(KVConnectorMetadata):  # type: ignore[misc]
    """The message from the scheduler's part to the workers' parts in a step.

    loads: loads that begin
    plain: requests that from now on run as vLLM expects, whatever was sent about them before
    """

    loads: list[Load] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)


@dataclass
class _Served:
    """A request with a layout, until it is finished.

    salt:      the caller's own `cache_salt`
    verified:  its result is None, or the reason why the blocks cannot be served
    local:     number of tokens that were in vLLM's cache when the request was last scheduled
    page_ids:  the request's pages, once they are allocated
    placed:    number of tokens at the beginning whose stored KV is on these pages, or being loaded
    complete:  whether the whole prompt has been computed, or will be by the step that was scheduled last
    loaded:    number of tokens that were loaded, over all loads of the request
    reason:    why the request is answered without stored blocks; None if it uses them
    """

    request: Request
    plan: Plan
    salt: str | None
    verified: Future[str | None]
    local: int = 0
    page_ids: list[int] = field(default_factory=list)
    placed: int = 0
    complete: bool = False
    loaded: int = 0
    reason: str | None = None

    @property
    def lacks_tokens(self) -> bool:
        """Return whether tokens between loaded ones are still to be computed, which vLLM already counts as computed."""
        return self.plan.is_scattered and bool(self.page_ids) and not self.complete


class SchedulerSide:
    """The scheduler's part: plans requests, verifies their blocks and gives the loads to the workers.

    verify:   raises RagCacheError when the block of a key cannot be served; called by several threads
    page_tokens: tokens in a page of vLLM's cache
    is_async: whether vLLM goes on with other requests while blocks are loaded; False: they are loaded within the step
              that needs them, layer by layer
    """

    def __init__(self, fingerprint: str, verify: Callable[[str], None], page_tokens: int, *, is_async: bool) -> None:
        self._fingerprint = fingerprint
        self._verify = verify
        self._page_tokens = page_tokens
        self._is_async = is_async
        self._served: dict[str, _Served] = {}
        self._beginning: list[Load] = []
        self._plain: list[str] = []
        self._threads = ThreadPoolExecutor(VERIFIERS, thread_name_prefix="ragcache-verify")
        self._pages: KVCacheManager | None = None

    def bind(self, pages: KVCacheManager) -> None:
        """Set vLLM's cache manager, which can evict pages that were cached too early."""
        self._pages = pages

    def on_new_request(self, request: Request) -> None:
        """Plan a request and name its KV in vLLM's prefix cache by its layout."""
        try:
            layout = RequestLayout.from_params(request.kv_transfer_params)
            if layout is None or not layout.blocks:
                return
            plan = make_plan(request.prompt_token_ids or [], layout, self._fingerprint)
        except LayoutError as error:  # an exception here would end the engine; without blocks the answer is exact
            log.error("request %s is answered without stored blocks: %s", request.request_id, error)
            return
        verified = self._threads.submit(self._why_not, plan.keys)
        self._served[request.request_id] = _Served(request, plan, request.cache_salt, verified)
        _rename(request, layout.salt(self._fingerprint, request.cache_salt))

    def count_loaded(self, request: Request, num_local: int) -> tuple[int | None, bool]:
        """Return how many tokens to load, and whether the load is asynchronous. None as the number: call again later.

        num_local: number of the first tokens, which are in vLLM's cache

        vLLM then schedules as many tokens as are left. The worker moves them to their places between loaded tokens
        (`ragcache_vllm.worker`).
        """
        served = self._served.get(request.request_id)
        if served is None or served.reason is not None:
            return 0, False
        if not wait([served.verified], KNOWN_S).done or self._is_being_computed(served):
            return None, False
        if (reason := served.verified.result()) is not None:
            self._give_up(served, reason)
            return None, False  # its exact hashes may hit pages that the salted hashes did not
        left = sum(span.num_tokens for span in served.plan.computed_behind(num_local, request.num_tokens))
        more = max(0, request.num_tokens - left - num_local)  # after preemption the hit may reach into the answer
        served.local = num_local
        return more, self._is_async and more > 0

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_loaded: int) -> None:
        """Begin the load of a request that has its pages."""
        served = self._served.get(request.request_id)
        if served is None or served.reason is not None:
            return
        if num_loaded:
            served.complete = False
            served.loaded += num_loaded
            served.placed = served.local
        elif not served.page_ids:  # vLLM's own cache has all tokens that are not computed, mostly after preemption
            self._plain.append(request.request_id)
            return
        if num_loaded or served.lacks_tokens:  # after an asynchronous load, its remaining pages
            (served.page_ids,) = (list(ids) for ids in blocks.get_block_ids())
            self._load_onto_pages(served, is_async=self._is_async and num_loaded > 0)

    def begin(self, output: SchedulerOutput) -> Loads:
        """Return the changes for the workers before this step."""
        for name in output.preempted_req_ids or ():
            self._forget_pages(name)
            if name in self._served:
                self._served[name].page_ids = []
        cached = output.scheduled_cached_reqs
        for name, page_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            served = self._served.get(name)
            resumes = name in cached.resumed_req_ids  # `allocated` got all pages of such a request
            if served is not None and served.reason is None and served.lacks_tokens and page_ids and not resumes:
                served.page_ids += page_ids[0]
                self._load_onto_pages(served, is_async=False)
        for name, count in output.num_scheduled_tokens.items():
            if (served := self._served.get(name)) is not None:
                request = served.request
                served.complete |= request.num_computed_tokens + count >= request.num_prompt_tokens
        told = Loads(self._beginning, self._plain)
        self._beginning, self._plain = [], []
        return told

    def failed(self, page_ids: Iterable[int]) -> None:
        """Answer the requests on these pages without stored blocks, because their load failed."""
        gone = set(page_ids)
        for served in self._served.values():
            if served.reason is None and not gone.isdisjoint(served.page_ids):
                self._evict(served.page_ids)
                self._give_up(served, "a stored block could not be read when it was loaded")

    def finished(self, request: Request) -> dict[str, Any] | None:
        """Return information about a finished request, sent with its answer as `kv_transfer_params`."""
        self._forget_pages(request.request_id)
        served = self._served.pop(request.request_id, None)
        if served is None:
            return None
        served.verified.cancel()
        return {PARAMS: {"loaded_tokens": served.loaded if served.reason is None else 0, "reason": served.reason}}

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _why_not(self, keys: Iterable[str]) -> str | None:
        """Return why these blocks cannot all be served, in words fit for a client; None if they can."""
        for key in keys:
            try:
                self._verify(key)
            except MissingBlockError:
                return f"block {key[:12]} is not stored"
            except Exception as error:  # any error: a thread's error would be lost
                log.warning("block %s cannot be served: %s", key, error)
                return f"block {key[:12]} is damaged or cannot be read"
        return None

    def _load_onto_pages(self, served: _Served, *, is_async: bool) -> None:
        """Load the tokens whose pages are allocated.

        vLLM gives a long prompt its pages step by step, counting computed tokens from the front; loaded tokens may be
        further back than that count. No token that runs before such a page is allocated attends to it.
        """
        plan, total = served.plan, served.request.num_tokens
        end = min(total, len(served.page_ids) * self._page_tokens)
        stretches = plan.loaded_within(served.placed, end)
        computed = plan.computed_behind(served.local, total) if plan.is_scattered else []
        served.placed = max(served.placed, end)
        if stretches:
            load = Load(served.request.request_id, stretches, list(served.page_ids), computed, total, is_async)
            self._beginning.append(load)

    def _is_being_computed(self, served: _Served) -> bool:
        """Return whether another request is computing tokens between loaded ones, under the same name.

        vLLM counts computed tokens from the front, so it takes pages as complete that still lack such tokens.
        """
        return any(
            other is not served and other.lacks_tokens and other.request.cache_salt == served.request.cache_salt
            for other in self._served.values()
        )

    def _forget_pages(self, name: str) -> None:
        """Evict pages that lack tokens from vLLM's prefix cache, when their request ended or was preempted too
        early.
        """
        served = self._served.get(name)
        if served is not None and served.lacks_tokens:
            self._evict(served.page_ids)

    def _evict(self, page_ids: Iterable[int]) -> None:
        if self._pages is not None:
            self._pages.evict_blocks(set(page_ids))

    def _give_up(self, served: _Served, reason: str) -> None:
        log.warning("request %s is answered without stored blocks: %s", served.request.request_id, reason)
        served.reason = reason
        self._plain.append(served.request.request_id)
        if served.request.num_computed_tokens == 0:
            _rename(served.request, served.salt)


def _rename(request: Request, salt: str | None) -> None:
    """Give a request's KV another name in vLLM's prefix cache.

    The salt is part of the hash of the first page, and so of the hashes of all later pages.
    """
    request.cache_salt = salt
    request.block_hashes.clear()
    request.update_block_hashes()
