"""Models with recurrent layers: passages' states composed, nothing of a passage run again (law 14)."""

import itertools

import pytest
import torch
from covering import covering, few
from hybrids import HYBRIDS, ONE_EACH, REFUSED, STEPPED, build, hybrid, save_hybrid, stepped_logits

import ragcache as rc
from ragcache.codecs import CODECS, get_codec
from ragcache.engine.caches.prefix_cache import PrefixCache
from ragcache.engine.load_plan import BlockSize, LoadPlan
from ragcache.engine.rates import Rates
from ragcache.errors import ConfigError, DamagedBlockError, PromptError, StaleBlockError, UnencodableBlockError
from ragcache.fusion import METHODS
from ragcache.kv.exact import read_cache, states_behind
from ragcache.kv.recurrent_block import HybridBlock
from ragcache.kv.state import StateMap
from ragcache.models.batch import ForwardRequest, ScheduledTokens, run_pieces
from ragcache.store.kv_store import KVStore
from ragcache.store.prefill_rate import PrefillRate

LENGTHS = (19, 33, 2, 1)  # beside whole ones, two that are shorter than a convolution's window


def draw(count: int, seed: int) -> list[int]:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


PREFIX, SUFFIX, CHUNKS = draw(7, 1), draw(6, 2), [draw(count, 10 + count) for count in LENGTHS]


@pytest.fixture(scope="module")
def world():
    """Each model as loaded, and as transformers has it."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = rc.load_lm(hybrid(name)), hybrid(name)
        return made[name]

    return get


def apart(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())


def plain_logits(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("name", sorted(STEPPED))
def test_law_14_states_compose_in_the_order_of_the_passages(world, name):
    lm, model = world(name)
    one = stepped_logits(model, [PREFIX + CHUNKS[0], SUFFIX])
    assert apart(one, plain_logits(model, PREFIX + CHUNKS[0] + SUFFIX)[-len(SUFFIX) :]) < 1e-5, (
        "the oracle is no oracle"
    )
    blocks = rc.encode(lm, rc.Prompt(PREFIX, CHUNKS, SUFFIX))
    found = {}
    for order in list(itertools.permutations(range(4)))[::14]:
        prompt = rc.Prompt(PREFIX, [CHUNKS[rank] for rank in order], SUFFIX)
        fused = rc.fuse(lm, prompt, blocks=[blocks[rank] for rank in order])
        theirs = stepped_logits(model, [PREFIX, *(CHUNKS[rank] for rank in order), [*SUFFIX, 5, 9]])
        assert apart(fused.next_logits, theirs[len(SUFFIX) - 1]) < 1e-5
        assert max(fused.computed_tokens) == len(SUFFIX)
        for rank, token in enumerate((5, 9)):  # decoding: tokens that run alone
            logits = lm.run([token], fused.next_position + rank, fused.cache)
            assert apart(logits, theirs[len(SUFFIX) + rank]) < 1e-5
        found[order] = fused.next_logits
    first, *others = found.values()
    assert min(apart(other, first) for other in others) > 1e-3, "the order of passages makes no difference"


@pytest.mark.parametrize("name", few(ONE_EACH, sorted(set(HYBRIDS) - set(ONE_EACH))))
def test_law_2_one_chunk_behind_the_prefix_is_full_prefill(world, name):
    lm, model = world(name)
    for chunk in CHUNKS[::3]:
        prompt = rc.Prompt(PREFIX, [chunk], SUFFIX)
        theirs = plain_logits(model, prompt.ids)[-1]
        assert apart(rc.fuse(lm, prompt, recipe="prefix").next_logits, theirs) < 1e-5
        assert apart(rc.fuse(lm, prompt, "full").next_logits, theirs) < 1e-5


@pytest.mark.parametrize("name", few(ONE_EACH, sorted(set(HYBRIDS) - set(ONE_EACH))))
def test_requests_of_one_pass_keep_their_states_apart(world, name):
    lm, _ = world(name)
    prompts = [rc.Prompt(PREFIX, CHUNKS[:1], SUFFIX), rc.Prompt(PREFIX, CHUNKS[1:3], SUFFIX)]
    tokens = [[3, 4, 8], [9]]
    ends = [rc.fuse(lm, prompt).next_position for prompt in prompts]
    alone = [lm.run(ids, at, rc.fuse(lm, p).cache) for ids, at, p in zip(tokens, ends, prompts, strict=True)]
    requests = [
        ForwardRequest(torch.tensor(ids), torch.arange(at, at + len(ids)), rc.fuse(lm, prompt).cache, ordered=True)
        for ids, at, prompt in zip(tokens, ends, prompts, strict=True)
    ]
    pieces = [ScheduledTokens.next(request, request.left) for request in requests]
    for _ in range(2):  # a pass that failed is undone, and its tokens run again
        joint = run_pieces(lm.model, pieces)
        assert max(map(apart, joint, alone)) < 1e-5
        for piece in pieces:
            piece.undo()


@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "lfm2"])
def test_questions_share_a_context_whose_states_are_kept(world, name):
    lm, _ = world(name)
    fused = rc.fuse(lm, rc.Prompt(PREFIX, CHUNKS[:2], SUFFIX))
    other = rc.Prompt(PREFIX, CHUNKS[:2], [4, 4, 9])
    assert torch.equal(rc.fuse(lm, other, base=fused.share()).next_logits, rc.fuse(lm, other).next_logits)
    whole = rc.fuse(lm, rc.Prompt(PREFIX, CHUNKS[:2], SUFFIX), "full")
    with pytest.raises(ConfigError, match=r"state cannot be cut.*read the passages by reposition"):
        whole.share()


def test_the_prefix_tree_finds_what_ends_where_a_state_was_kept(world):
    lm, _ = world("qwen3_next")
    tree, ids = PrefixCache(lm.shape, 1 << 22), draw(40, 5)
    for count in (30, 12):
        context = lm.read(ids[:count])
        tree.insert("text", ids[:count], read_cache(context), states=states_behind(context, count))
    assert tree.insert("text", ids, read_cache(lm.read(ids))) == 30, "a sequence without its state is not kept"
    for asked, found in ((40, 30), (30, 30), (29, 12), (12, 12), (11, 0)):
        with tree.match("text", ids[:asked]) as known:
            assert known.num_tokens == found == tree.count("text", ids[:asked])
            if found:
                ours = lm.read(ids[:asked], known)
                for mine, theirs in zip(ours.states, lm.read(ids[:asked]).states, strict=True):
                    assert apart(mine.state, theirs.state) < 1e-5
    with tree.match("text", ids) as known:
        known.cut(20)
        assert known.num_tokens == 12
    held = tree.stats().num_bytes
    assert held == 30 * lm.shape.token_bytes + 2 * lm.shape.state_bytes
    tree.clear()
    assert tree.stats().num_bytes == 0
    small = PrefixCache(lm.shape, held // 4)
    context = lm.read(ids[:30])
    assert small.insert("text", ids[:30], read_cache(context), states=states_behind(context, 30)) == 0
    assert small.stats().num_bytes == 0


ROUNDED = {"raw": False, "bfloat16": False, "int8": True, "int4": True}


@pytest.mark.parametrize(("codec", "name"), covering(sorted(CODECS), ["qwen3_next", "bamba", "lfm2"]))
def test_a_codec_keeps_states_as_they_are_or_in_int8_by_row(world, codec, name):
    lm, _ = world(name)
    (block,) = rc.encode(lm, rc.Prompt(PREFIX, CHUNKS[:1], SUFFIX))
    used = get_codec(codec).for_trial(block.kv)
    tensors = used.encode(block)
    back = used.decode(tensors)
    assert isinstance(back, HybridBlock)
    maps = {key: tensor for key, tensor in tensors.items() if key.startswith("state.")}
    assert sum(t.nbytes for t in maps.values()) == used.expected_state_bytes(lm.shape.states, lm.dtype.itemsize)
    assert back.num_bytes == back.kv.num_bytes + sum(t.nbytes for t in maps.values()), "held as they are stored"
    again = used.encode(back)
    assert all(torch.equal(again[key], tensor) for key, tensor in maps.items()), "encoding anew changes no bit"
    off = 0.0
    for mine, theirs in zip(back.states, block.states, strict=True):
        assert torch.equal(mine.tail, theirs.tail)
        for key in {"p", "q"} & theirs.tensors.keys():
            exact, found = theirs.tensors[key], mine.tensors[key]
            if not ROUNDED.get(codec, used.rounds_states) or exact.shape[-1] == 1:
                assert torch.equal(found, exact)
                continue
            step = exact.abs().amax(-1, keepdim=True) / 127
            distance = (found * mine.tensors[f"{key}_scales"] - exact).abs()
            assert found.dtype == torch.int8
            assert bool((distance <= 0.5001 * step).all())
            off = max(off, float(distance.max()))
    assert off <= used.error_bound(block)
    for lacking in set(maps) - {key for key in maps if key.endswith(".tail")} or {"state.1.tail"}:
        with pytest.raises(DamagedBlockError, match="maps of recurrent layers"):
            used.decode({key: tensor for key, tensor in tensors.items() if key != lacking})


@pytest.mark.parametrize("name", few(["qwen3_next", "bamba"], ["qwen3_5", "granite", "nemotron_h"]))
def test_rounded_states_compose_to_nearly_the_same(world, name):
    """Ten passages, by maps in int8: 0.002 to 0.011 of the logits' norm; without P at all it is 0.13 to 0.8."""
    lm, _ = world(name)
    prompt, int8 = rc.Prompt(PREFIX, [draw(40, seed) for seed in range(10)], SUFFIX), get_codec("int8")
    blocks = rc.encode(lm, prompt)
    exact = rc.fuse(lm, prompt, blocks=blocks).next_logits

    def fused(change):
        changed = [HybridBlock(block.kv, [change(one) for one in block.states]) for block in blocks]
        return apart(rc.fuse(lm, prompt, blocks=changed).next_logits, exact)

    rounded = [int8.decode(int8.encode(block)) for block in blocks]
    assert [len(block.states) for block in rounded] == [len(lm.shape.states)] * 10
    assert 0 < fused(StateMap.rounded) < 0.02 < 0.1 < fused(lambda one: StateMap(one.p * 0, one.q, one.tail))


def test_states_that_cannot_be_rounded_are_refused(world):
    lm, _ = world("qwen3_next")
    (block,) = rc.encode(lm, rc.Prompt(PREFIX, CHUNKS[:1], SUFFIX))
    broken = [StateMap(one.p, one.q / 0, one.tail) for one in block.states]
    with pytest.raises(UnencodableBlockError, match="recurrent layer 0 holds infinite numbers"):
        get_codec("int8").encode(HybridBlock(block.kv, broken))


def test_bytes_of_a_block_are_those_that_its_shape_states(world):
    for name in sorted(HYBRIDS):
        lm, _ = world(name)
        (block,) = rc.encode(lm, rc.Prompt(PREFIX, CHUNKS[:1], SUFFIX))
        assert block.num_bytes == len(CHUNKS[0]) * lm.shape.token_bytes + lm.shape.map_bytes
        cache = rc.fuse(lm, rc.Prompt(PREFIX, CHUNKS[:1], SUFFIX)).cache
        assert sum(state.num_bytes for state in cache.states) == lm.shape.state_bytes


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_budgets_and_load_plans_count_the_maps(world, codec, tmp_path):
    """A block's states take far more than its keys and values: the memory tier's budget holds fewer blocks, and a
    disk on which its keys and values alone would pay leaves it to be computed."""
    lm, _ = world("qwen3_next")
    blocks = {f"{n:064x}": block for n, block in enumerate(rc.encode(lm, rc.Prompt([], [draw(40, 9)] * 3, [4])))}
    maps = get_codec(codec).expected_state_bytes(lm.shape.states, 4)
    with KVStore(tmp_path, codec=codec, memory_bytes=5 * maps // 2) as store:
        for key, block in blocks.items():
            store.put(key, block)
        assert 2 * maps > store.stats().bytes_by_tier["memory"] > maps
        sizes = {key: one.num_bytes for key, one in store.lookup(blocks).items()}
    on_disk = max(sizes.values())
    assert on_disk > maps + 40 * lm.shape.layers[0].numbers
    rates = Rates(lambda: 0.0)
    rates.tier("disk").set(1e-6, maps)  # a second for the maps of a block, and another to compute it
    rates.compute.set(PrefillRate.of(40))
    for num_bytes, computed in ((on_disk - maps, ()), (on_disk, ("block",))):
        plan = LoadPlan({"block": BlockSize(40, num_bytes, "disk")}, rates, batch_tokens=40, readers=8)
        assert plan.next_batch() == computed


@pytest.mark.parametrize("codec", few(["int8"], ["raw"]))
def test_an_estimate_of_an_ingestion_counts_the_maps(codec, tmp_path):
    model = save_hybrid("qwen3_next", tmp_path / "model")
    with rc.RagCache.open(tmp_path / "kb", model=model, method="reposition", store=rc.StoreConfig(codec=codec)) as kb:
        texts = ["".join(f"Cat {n} of {m} sat on a mat. " for n in range(20)) for m in range(3)]
        documents = [rc.Document(str(n), text) for n, text in enumerate(texts)]
        estimate = kb.estimate_kv(documents)
        report = kb.ingest(documents)
        assert estimate.num_bytes == pytest.approx(report.kv_bytes, rel=0.25)


@pytest.mark.parametrize("method", ["a3", "ape", "cacheblend", "concat", "epic", "link", "prophet"])
def test_methods_that_cannot_take_a_state_along_are_refused(world, method):
    lm, _ = world("bamba")
    assert method in METHODS
    with pytest.raises(ConfigError, match=f"method '{method}' .* recurrent layers.*choose one of full, reposition"):
        rc.fuse(lm, rc.Prompt(PREFIX, CHUNKS, SUFFIX), method)


def test_recipes_labels_and_blocks_that_do_not_fit_are_refused(world):
    lm, _ = world("bamba")
    prompt = rc.Prompt(PREFIX, CHUNKS[:2], SUFFIX)
    for recipe in (rc.Recipe("isolated", bos=True), rc.Recipe(kept=0.5), rc.Recipe(neighbours=1)):
        with pytest.raises(ConfigError, match="recurrent layers"):
            rc.encode(lm, prompt, recipe)
        with pytest.raises(ConfigError, match="use isolated, prefix or primer"):
            rc.fuse(lm, prompt, recipe=recipe)
    labelled = rc.Prompt(PREFIX, CHUNKS[:2], SUFFIX, label_ids=[[5], [6]])
    with pytest.raises(PromptError, match="choose full"):
        rc.fuse(lm, labelled)
    blocks = rc.encode(lm, prompt)
    other = world("qwen3_next")[0]
    bare = [block.kv for block in blocks]
    short = [
        HybridBlock(block.kv, [StateMap(one.p, one.q, one.tail[:, :1]) for one in block.states]) for block in blocks
    ]
    for wrong in (bare, short, rc.encode(other, prompt)):
        with pytest.raises(StaleBlockError, match="made by another model"):
            rc.fuse(lm, prompt, blocks=wrong)


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_what_does_not_go_on_from_a_state_is_refused_by_name(case):
    kind, sizes, reason = REFUSED[case]
    with pytest.raises(rc.UnsupportedModelError, match=rf"\({kind}\) is not supported: .*{reason}"):
        rc.load_lm(build(kind, sizes))


def test_a_mixer_that_forgets_its_state_between_passes_is_refused(monkeypatch):
    model = hybrid("qwen3_next")
    mixer = model.model.layers[1].linear_attn
    plain = mixer.forward

    def forgetful(hidden_states, cache_params=None, **kwargs):
        cache_params.layers[mixer.layer_idx].has_previous_state[0] = False
        return plain(hidden_states, cache_params=cache_params, **kwargs)

    monkeypatch.setattr(mixer, "forward", forgetful)
    with pytest.raises(rc.UnsupportedModelError, match="recurrent layer 1 does not go on from its state"):
        rc.load_lm(model)


@pytest.mark.parametrize("world_of", few([("granite-nope", "int8")], [("qwen3_next", "raw")]), ids="-".join)
def test_a_store_answers_from_blocks_on_disk(world_of, tmp_path):
    name, codec = world_of
    model = save_hybrid(name, tmp_path / "model")
    texts = {"cats": "The cat sat on the mat.\n", "dogs": "Dogs bark at night in Kelbrook.\n"}
    question, sampling = "Where is Kelbrook?", rc.Sampling(max_tokens=6)
    path = tmp_path / "kb"
    config = rc.StoreConfig(codec=codec)
    with rc.RagCache.open(path, model=model, method="reposition", store=config) as kb:
        kb.ingest(rc.Document(id, text) for id, text in texts.items())
        first = kb.ask(question, k=2, sampling=sampling)
    with rc.RagCache.open(path, method="reposition") as kb:
        again = [kb.ask(question, k=2, sampling=sampling) for _ in range(2)]
        assert {answer.text for answer in again} == {first.text}
        assert again[1].usage.created_tokens == 0 < again[1].usage.cached_tokens
        with pytest.raises(ConfigError, match=r"recurrent layers.*choose method=.full"):
            kb.chat([{"role": "user", "content": question}], k=1, context="keep")
    for method in ("link", "cacheblend"):
        with pytest.raises(ConfigError, match="recurrent layers"):
            rc.RagCache.open(path, method=method)
