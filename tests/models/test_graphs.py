"""Passes as CUDA graphs, with a double of CUDA's graphs: their logits are those of plain passes."""

import logging
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import pairwise
from threading import Event

import pytest
import torch
from covering import covering
from families import FAMILIES, assert_same, block_diagonal, load_tiny, oracle_logits, random_prompt
from graph_tape import TapeRecorder
from hybrids import save_hybrid
from kit.makers import messages_of
from late_lane import LateLane
from torch.utils._python_dispatch import TorchDispatchMode

import ragcache as rc
from ragcache.kv.buffers import BufferPool
from ragcache.models import graphs
from ragcache.models.batch import ForwardRequest, ScheduledTokens, run_pieces
from ragcache.models.deadline import NO_LIMIT
from ragcache.models.generate import decode
from ragcache.models.graphs import Bucket, GraphedPasses, use_graphs
from ragcache.models.requests import DecodingSequence
from ragcache.models.sampler import Sampling

SOME = ("llama", "qwen3", "gemma2", "gemma3", "gpt_oss", "mixtral", "gemma4", "deepseek_v2")
ALONE = [Bucket(1, 1, 128), Bucket(1, 32, 128)]
JOINT = [Bucket(8, 1, 256), Bucket(8, 32, 256)]
ROOM = 4 << 20


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(graphs, "BUCKETS", ALONE)


@pytest.fixture
def tiny(tmp_path):
    return load_tiny("llama", tmp_path)[0]


said = messages_of(graphs, logging.INFO)


def graphed(lm, num_bytes=ROOM, **options):
    """Have it run by graphs' doubles; these, and its passes."""
    recorder = TapeRecorder(**options)
    use_graphs(lm, num_bytes, recorder)
    recorder.runs.clear()
    return recorder, getattr(lm.scheduler.forward, "__self__", None)


def assert_close(ours, plain, of=None):
    """Within 1e-5 of the largest logit; of: these, where log-probabilities are compared."""
    assert float((ours - plain).abs().max()) <= 1e-5 * float((plain if of is None else of).abs().max())


def answer(lm, prompt, tokens=6, **options):
    """Logits behind the prompt, and what is decoded after it with each token's scores."""
    read = rc.fuse(lm, prompt, "reposition", reserve_tokens=tokens, **options)
    scores = []
    sampling = Sampling(max_tokens=tokens, logprobs=3)
    ids = list(decode(lm, read.cache, read.next_logits, prompt.num_tokens, sampling, scores=scores))
    return read.next_logits, ids, torch.tensor([[value for _, value in one.top] for one in scores])


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in SOME else pytest.mark.slow) for name in FAMILIES]
)
def test_a_question_and_its_answer_are_those_of_plain_passes(family, tmp_path, said):
    lm, oracle = load_tiny(family, tmp_path)
    plain = [answer(lm, random_prompt(seed)) for seed in range(2)]
    recorder, passes = graphed(lm)
    for seed, (logits, ids, scores) in enumerate(plain):
        ours = answer(lm, random_prompt(seed))
        assert_close(ours[0], logits)
        assert ours[1] == ids
        assert_close(ours[2], scores, of=logits)
    assert len(recorder.runs) == 2 * 7  # each prefix, question, and five steps of each answer
    assert list(passes.recorded) == ALONE
    assert_same(ours[0], oracle_logits(oracle, random_prompt(1), block_diagonal(random_prompt(1))))
    assert not said()


def requests(lm, lengths, count=40, shared=None):
    """Caches with contexts of these lengths that a plain pass read, and `count` more ids of each. Half of them stand on
    the same 30 tokens, where these are `shared`."""
    made = []
    for rank, length in enumerate(lengths):
        ids = torch.randint(3, 199, (length + count,), generator=torch.Generator().manual_seed(rank))
        base = shared if rank % 2 else None
        start = 0 if base is None else base.num_tokens
        cache = lm.new_cache(length + count, base=base)
        run = ForwardRequest(ids, torch.arange(start, start + len(ids)), cache, ordered=True)
        piece = ScheduledTokens.next(run, length)
        run_pieces(lm.model, [piece])
        piece.end()
        made.append(run)
    return made


def both_ways(lm, passes, runs, counts):
    """The next tokens of each, by the graphs and by a plain pass; then again one more of each by a plain pass."""
    found = []
    for forward in (passes.forward, partial(run_pieces, lm.model)):
        pieces = [ScheduledTokens.next(run, count) for run, count in zip(runs, counts, strict=True)]
        logits = [torch.stack(forward(pieces))]
        behind = [ForwardRequest(run.ids[-1:], run.positions[-1:] + 1, run.cache, ordered=True) for run in runs]
        logits.append(torch.stack(run_pieces(lm.model, [ScheduledTokens.next(one, 1) for one in behind])))
        found.append(torch.cat(logits))
        for piece in pieces:
            piece.undo()
    return found


@pytest.mark.parametrize(("rows", "family"), covering([1, 3, 8, 11], ["llama", "gemma3", "gpt_oss", "deepseek_v2"]))
def test_rows_of_different_lengths_run_in_one_recorded_pass(tmp_path, family, rows, monkeypatch):
    monkeypatch.setattr(graphs, "BUCKETS", JOINT)
    lm, _ = load_tiny(family, tmp_path)
    recorder, passes = graphed(lm)
    first = requests(lm, [30])[0]
    lengths = [5 + 17 * rank % 90 for rank in range(rows)]
    runs = requests(lm, lengths, shared=first.cache.share(30))
    for counts in ([1] * rows, [1 + 7 * rank % 32 for rank in range(rows)]):
        recorder.runs.clear()
        ours, plain = both_ways(lm, passes, runs, counts)
        assert_close(ours, plain)
        assert len(recorder.runs) == -(-rows // 8)


def test_one_recorded_pass_serves_any_context(tiny, monkeypatch):
    monkeypatch.setattr(graphs, "BUCKETS", [Bucket(1, 1, 256)])
    recorder, passes = graphed(tiny)
    for length in (1, 2, 63, 64, 65, 130, 255):
        ours, plain = both_ways(tiny, passes, requests(tiny, [length]), [1])
        assert_close(ours, plain)
    assert len(recorder.runs) == 7
    both_ways(tiny, passes, requests(tiny, [256]), [1])
    assert len(recorder.runs) == 7, "there is no room for a token more"


def test_what_others_left_in_the_arena_reaches_nobody(tiny, monkeypatch):
    monkeypatch.setattr(graphs, "BUCKETS", JOINT)
    _, passes = graphed(tiny)
    for tensor in (*tiny.pool.arena.keys, *tiny.pool.arena.values):
        tensor[:, :, BufferPool.NOWHERE + 1 :] = torch.nan
    runs = requests(tiny, [40, 9, 21])
    ours, plain = both_ways(tiny, passes, runs, [20, 1, 7])
    assert ours.isfinite().all()
    assert_close(ours, plain)


def test_a_part_runs_when_its_layers_were_waited_for(tiny, monkeypatch):
    """What was not waited for is NaN; no part waits for layers of later ones."""
    monkeypatch.setattr(graphs, "PART_LAYERS", 1)
    prompt = random_prompt()
    plain = answer(tiny, prompt)
    recorder, _ = graphed(tiny)
    tiny.pool.lane = lane = LateLane()
    recorder.noted = lambda: lane.waited
    ours = answer(tiny, prompt)
    assert_close(ours[0], plain[0])
    assert ours[1] == plain[1]
    assert recorder.runs[3:6] == [(1, 1), (2, 2), (3, 3)], "the question's, behind the prefix's"


def test_askers_share_recorded_passes(tmp_path, monkeypatch):
    """Through the scheduler, from several threads."""
    monkeypatch.setattr(graphs, "BUCKETS", [*ALONE, *JOINT])
    lm, _ = load_tiny("qwen3", tmp_path)
    plain = [answer(lm, random_prompt(seed), tokens=12)[1] for seed in range(8)]
    recorder, _ = graphed(lm)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda seed: answer(lm, random_prompt(seed), tokens=12)[1], range(8))) == plain
    assert 12 <= len(recorder.runs) <= 8 * 12


# Where graphs are not used, plain passes answer, and one line says why.


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"lengths": [40], "drop": True}, "not where one can read it"),
        ({"lengths": [300]}, "too long for a CUDA graph"),
        ({"lengths": [40] * 2, "fill": True}, "not where one can read it"),
    ],
)
def test_what_no_graph_can_read_is_named_once(tiny, said, options, why):
    recorder, passes = graphed(tiny)
    if options.get("fill"):
        held = tiny.pool.acquire(graphs_room(tiny))
    runs = requests(tiny, options["lengths"])
    if options.get("drop"):
        runs[0].cache.retain(1, torch.tensor([0, 3, 8]))
    for _ in range(2):
        ours, plain = both_ways(tiny, passes, runs, [1] * len(runs))
        assert torch.equal(ours, plain)
    assert not recorder.runs
    assert [why in line for line in said()] == [True]
    assert not options.get("fill") or held.start is not None


def graphs_room(lm):
    """Tokens of the arena that are free now."""
    return 64 * lm.pool._taken.count(0)


def test_methods_that_run_tokens_out_of_order_are_as_they_were(tiny):
    prompt = random_prompt()
    plain = rc.fuse(tiny, prompt, "cacheblend", ratio=0.3).next_logits
    graphed(tiny)
    assert_close(rc.fuse(tiny, prompt, "cacheblend", ratio=0.3).next_logits, plain)


def warned(said):
    [line] = [line for line in said() if "takes longer on a GPU" in line]
    return line.removeprefix("passes run without CUDA graphs, which takes longer on a GPU: ")


def test_a_model_that_reads_the_device_cannot_be_recorded(tmp_path, said):
    lm, oracle = load_tiny("mixtral", tmp_path)
    lm.model.set_experts_implementation("eager")
    recorder, passes = graphed(lm)
    assert passes is None
    assert warned(said).startswith("RuntimeError: operation not permitted when stream is capturing")
    assert lm.pool.arena is None
    prompt = random_prompt()
    logits = rc.fuse(lm, prompt, "reposition").next_logits
    assert_same(logits, oracle_logits(oracle, prompt, block_diagonal(prompt)))
    assert not recorder.runs


def test_recurrent_layers_cannot_be_recorded(tmp_path, said):
    lm = rc.load_lm(save_hybrid("qwen3_5", tmp_path))
    assert graphed(lm)[1] is None
    assert "has recurrent layers" in warned(said)


@pytest.mark.parametrize("where", ["arena", "second size"])
def test_a_card_without_room(tiny, said, monkeypatch, where):
    plain, record, left = answer(tiny, random_prompt()), TapeRecorder.record, iter(range(1))

    def full(*given):
        if where == "arena" or next(left, None) is None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 6.00 GiB\nand more")
        return record(*given)

    monkeypatch.setattr(*((BufferPool, "open_arena") if where == "arena" else (TapeRecorder, "record")), full)
    assert graphed(tiny)[1] is None
    assert warned(said) == "OutOfMemoryError: CUDA out of memory. Tried to allocate 6.00 GiB"
    assert tiny.pool.arena is None
    assert answer(tiny, random_prompt())[1] == plain[1]
    graphed(tiny)  # the store is opened again
    assert warned(said)


def test_scratch_memory_is_bounded(tiny, said, monkeypatch):
    monkeypatch.setattr(graphs, "BUCKETS", [*ALONE, *JOINT])
    recorder, passes = graphed(tiny, num_bytes=ROOM, free=1 << 30, taken=ROOM // 8)
    assert len(passes.recorded) == 3, "three eighths are the first that are more than a quarter"
    assert (1 << 30) - recorder.free <= ROOM
    [line] = said()
    assert line == "CUDA graphs of 3 sizes, for want of memory or time for more"


def test_warming_up_ends_in_time(tiny, monkeypatch):
    monkeypatch.setattr(graphs, "WARM_S", 0.0)
    assert not graphed(tiny)[1].recorded
    answer(tiny, random_prompt())


def test_a_memory_too_small_for_a_prompt_is_named(tiny, said):
    assert graphed(tiny, num_bytes=200 * tiny.kv_bytes_per_token)[1] is None
    assert "graph_bytes" in warned(said)
    answer(tiny, random_prompt())


@pytest.mark.parametrize("wrong", ["a row", "all"])
def test_a_graph_that_reads_otherwise_is_switched_off(tiny, said, monkeypatch, wrong):
    run = GraphedPasses._run

    def otherwise(self, bucket, given, before_layer):
        logits = run(self, bucket, given, before_layer)
        return logits + 0.5 if wrong == "all" else torch.cat([logits[:-1], logits[-1:] * 1.001])

    plain = answer(tiny, random_prompt())
    monkeypatch.setattr(GraphedPasses, "_run", otherwise)
    assert graphed(tiny)[1] is None
    assert warned(said).startswith(
        "ArithmeticError: a pass of Bucket(rows=1, tokens=1, context=128) gives something else"
    )
    assert answer(tiny, random_prompt())[1] == plain[1]


def test_a_device_that_fails_amid_an_answer(tiny, said):
    """The pass runs again the plain way, and all later ones."""
    plain = answer(tiny, random_prompt(), tokens=12)
    recorder, passes = graphed(tiny)
    given, (parts, out) = passes.recorded[ALONE[0]]
    left = iter(range(4))

    def failing():
        if next(left, None) is None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nlong advice")
        parts[0][1]()

    passes.recorded[ALONE[0]] = given, graphs.Recorded([(parts[0][0], failing)], out)
    ours = answer(tiny, random_prompt(), tokens=12)
    assert ours[1] == plain[1]
    assert len(recorder.runs) == 2 + 4
    assert warned(said) == "RuntimeError: CUDA error: an illegal memory access was encountered"


def test_graphs_are_for_cuda_and_off_by_an_option(tiny):
    before = tiny.scheduler.forward
    use_graphs(tiny)
    use_graphs(tiny, ROOM)
    use_graphs(tiny, 0, TapeRecorder())
    assert tiny.scheduler.forward is before
    assert tiny.pool.arena is None
    assert graphed(tiny)[1] is not None


@pytest.mark.parametrize("by", ["ask", "warm_up"])
def test_graphs_are_made_when_something_is_to_answer(open_kb, monkeypatch, by):
    """Not to add documents; by the store's option."""
    from ragcache.engine import local_engine

    seen = []
    monkeypatch.setattr(local_engine, "use_graphs", lambda lm, num_bytes: seen.append(num_bytes))
    kb = open_kb(store=rc.StoreConfig(graph_bytes=3), texts={"dogs": "Dogs bark at night."})
    assert not seen
    kb.warm_up() if by == "warm_up" else kb.ask("Where?", sampling=rc.Sampling(max_tokens=1))
    assert seen == [3]
    with pytest.raises(rc.errors.ConfigError, match="graph_bytes"):
        rc.StoreConfig(graph_bytes=-1)


def test_who_asks_meanwhile_waits_until_they_are_made(tiny):
    recorder, began, go_on = TapeRecorder(), Event(), Event()

    def record(*given):
        began.set()
        assert go_on.wait(10)
        return TapeRecorder.record(recorder, *given)

    recorder.record = record
    with ThreadPoolExecutor(2) as pool:
        pool.submit(use_graphs, tiny, ROOM, recorder)
        assert began.wait(10)
        second = pool.submit(use_graphs, tiny, ROOM, recorder)
        assert not wait([second], 0.1).done
        go_on.set()
        second.result(10)
        assert isinstance(getattr(tiny.scheduler.forward, "__self__", None), GraphedPasses)


def test_a_decoded_token_takes_one_upload_that_nobody_waits_for(tiny):
    """Counted on a device that computes nothing; what chooses the token reads it, and is not counted."""

    class Uploads(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("device") == torch.device("meta"):
                waits.append(not (kwargs or {}).get("non_blocking", False))
            return func(*args, **(kwargs or {}))

    waits = []
    sequence = DecodingSequence(tiny.new_cache(8), lambda _: 5, 3, 20, (), NO_LIMIT)
    with Uploads():
        for _ in range(3):
            following = sequence.advance(torch.empty(199, device="meta"))
    assert waits == [False] * 3
    assert (following.run.ids.shape, following.run.positions.shape) == ((1,), (1,))
    here = sequence.advance(torch.zeros(199))
    assert (here.run.ids.tolist(), here.run.positions.tolist()) == ([5], [6])


# The arena.


def test_parts_of_the_arena_do_not_overlap_and_are_given_back(tiny):
    tiny.pool.open_arena(64 * 20)
    taken = [tiny.pool.acquire(count) for count in (1, 64, 65, 500)]
    assert [one.start for one in taken] == [64, 128, 192, 320]
    assert [one.capacity for one in taken] == [64, 64, 128, 512]
    for before, after in pairwise(taken):
        assert before.start + before.capacity <= after.start
    assert tiny.pool.acquire(600).start is None
    for one in (taken[1], taken[2]):
        tiny.pool.release(one)
    assert tiny.pool.acquire(180).start == 128, "two that touch are one"
    taken[0].keys[1].fill_(7.0)
    assert (tiny.pool.arena.keys[1][:, :, 64:128] == 7).all()
    assert not tiny.pool.arena.keys[1][:, :, :64].any()
