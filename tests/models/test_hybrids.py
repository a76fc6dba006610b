"""Models with recurrent layers: passages' states composed, nothing of a passage run again (law 14)."""

from __future__ import annotations

import itertools

import pytest
import torch
from hybrids import HYBRIDS, REFUSED, STEPPED, build, hybrid, save_hybrid, stepped_logits

import ragcache as rc
from ragcache.codecs import CODECS, get_codec
from ragcache.codecs.block_file import read_block, write_block
from ragcache.errors import ConfigError, DamagedBlockError, PromptError, StaleBlockError
from ragcache.fusion import METHODS
from ragcache.kv.block import HybridBlock
from ragcache.kv.prefix_cache import PrefixCache, read_cache, states_behind
from ragcache.kv.state import StateMap
from ragcache.models.batch import ForwardRequest, ScheduledTokens, run_pieces

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
    for order in list(itertools.permutations(range(4)))[::7]:
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


@pytest.mark.parametrize("name", sorted(HYBRIDS))
def test_law_2_one_chunk_behind_the_prefix_is_full_prefill(world, name):
    lm, model = world(name)
    for chunk in CHUNKS:
        prompt = rc.Prompt(PREFIX, [chunk], SUFFIX)
        theirs = plain_logits(model, prompt.ids)[-1]
        assert apart(rc.fuse(lm, prompt, recipe="prefix").next_logits, theirs) < 1e-5
        assert apart(rc.fuse(lm, prompt, "full").next_logits, theirs) < 1e-5


@pytest.mark.parametrize("name", sorted(HYBRIDS))
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
    with pytest.raises(ValueError, match="state cannot be cut"):
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


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_every_codec_keeps_states_as_they_are(world, codec, tmp_path):
    lm, _ = world("qwen3_next")
    (block,) = rc.encode(lm, rc.Prompt(PREFIX, CHUNKS[:1], SUFFIX))
    used = get_codec(codec).for_trial(block.kv)
    tensors = used.encode(block)
    back = used.decode(tensors)
    assert isinstance(back, HybridBlock)
    for mine, theirs in zip(back.states, block.states, strict=True):
        assert all(torch.equal(mine.tensors[key], theirs.tensors[key]) for key in theirs.tensors)
    lacking = {key: tensor for key, tensor in tensors.items() if key != "state.1.q"}
    with pytest.raises(DamagedBlockError, match="maps of recurrent layers"):
        used.decode(lacking)


def test_a_block_file_with_states_is_read_back_and_damage_is_noticed(world, tmp_path):
    lm, _ = world("granite")
    (block,) = rc.encode(lm, rc.Prompt(PREFIX, CHUNKS[:1], SUFFIX))
    path = tmp_path / "block"
    write_block(path, "key", block, get_codec("raw"))
    assert read_block(path, "key").equal(block)
    whole = bytearray(path.read_bytes())
    place = whole.find(block.states[0].q.numpy().tobytes())
    whole[place] ^= 1
    path.write_bytes(whole)
    with pytest.raises(DamagedBlockError, match="checksum"):
        read_block(path, "key")


def test_bytes_of_a_block_are_those_that_its_shape_states(world):
    for name in sorted(HYBRIDS):
        lm, _ = world(name)
        (block,) = rc.encode(lm, rc.Prompt(PREFIX, CHUNKS[:1], SUFFIX))
        assert block.num_bytes == len(CHUNKS[0]) * lm.shape.token_bytes + lm.shape.map_bytes
        cache = rc.fuse(lm, rc.Prompt(PREFIX, CHUNKS[:1], SUFFIX)).cache
        assert sum(state.num_bytes for state in cache.states) == lm.shape.state_bytes


@pytest.mark.parametrize("method", sorted({"a3", "cacheblend", "epic", "link", "prophet", "ape", "concat", "kvcomm"}))
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
        with pytest.raises(ConfigError, match="use isolated or prefix"):
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


@pytest.mark.parametrize(("name", "codec"), [("qwen3_next", "raw"), ("granite-nope", "int8")])
def test_a_store_answers_from_blocks_on_disk(name, codec, tmp_path):
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
