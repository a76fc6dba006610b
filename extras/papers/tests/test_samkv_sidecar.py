"""SamKV with sidecars: a second implementation of appendix A, the bytes that are read, and sidecars in a store."""

import math
from dataclasses import fields

import numpy as np
import pytest
import torch
from blocks import same
from families import METHOD_FAMILIES, random_prompt, save_tiny, tiny
from formula_oracle import step_by_step
from kit.makers import each, made_by
from paper_oracles import assert_like, with_formula
from test_samkv import ANSWER, SIZES, Written
from tiny_model import save_tiny_llama
from torch.utils._pytree import tree_leaves

import ragcache as rc
from ragcache.codecs import get_codec
from ragcache.codecs.block_file import codec_of, read_block, write_block
from ragcache.errors import DamagedBlockError
from ragcache_papers.samkv_sidecar import Sidecar, Sizes, SurveyedBlock, importance, stable_layers, survey

CHUNKS = (49, 38, 11, 55)
KEPT = {"mistral-window", "gemma2", "smollm3", "gpt_oss"}


FAMILIES = [
    name if name in KEPT else pytest.param(name, marks=pytest.mark.slow) for name in METHOD_FAMILIES if name != "gemma4"
]
family = each(FAMILIES, with_formula, scope="module")
llama = made_by(lambda: tiny("llama")[0])


def surveyed(lm, prompt, sizes=SIZES, recipe="isolated"):
    blocks = rc.encode(lm, prompt, recipe)
    prefix = lm.read(prompt.prefix_ids) if recipe == "prefix" else None
    pairs = zip(prompt.chunk_ids, blocks, strict=True)
    return [survey(lm, ids, block, prefix, Sizes(**sizes)) for ids, block in pairs]


def test_layers_of_several_shapes_have_no_sidecars(tmp_path):
    lm = rc.load_lm(save_tiny("gemma4", str(tmp_path)))
    (ids,) = random_prompt(3, chunks=CHUNKS[:1]).chunk_ids
    (block,) = lm.encode([ids], rc.Recipe())
    assert get_codec("samkv").beside(lm, ids, block, None) is block


def alpha(curve):
    """Return alpha by NumPy's least squares of log y = log c - alpha log x."""
    if len(curve) < 2:
        return 0.0
    x, y = np.log(np.arange(1, len(curve) + 1)), np.log(np.maximum(curve, 1e-12))
    return -np.polyfit(x, y, 1)[0]


class WithSidecars(Written):
    """Appendix A in NumPy, from each passage's own attention, with loops over its blocks."""

    def asking(self, layer, query):
        return self.alone.queries[layer][0]

    def attention(self, layer, document):
        tokens = sorted(self.documents[document])
        weights = self.alone.weights[layer][0].double().mean(0).numpy()
        return tokens, weights[np.ix_(tokens, tokens)]

    def importance(self, layer, document):
        """Return for each block its alpha, and its best token with that token's mean attention."""
        tokens, weights = self.attention(layer, document)
        found = []
        for block in self.blocks[document]:
            curves = {token: weights[tokens.index(token) + 1 :, tokens.index(token)] for token in block}
            best = max(block, key=lambda token: (curves[token].mean(), -token))
            found.append((alpha(curves[best]), curves[best].mean(), best))
        return found

    def standing_out(self, layer, document):
        alphas = np.array([one[0] for one in self.importance(layer, document)])
        return alphas < alphas.mean() - 3 * alphas.std() if len(alphas) else alphas

    def low_and_high(self, layer, document):
        found, scores = self.importance(layer, document), self.scores[layer][document][0]
        high = min(range(len(found)), key=lambda rank: found[rank][0])
        low = min(range(len(found)), key=lambda rank: found[rank][1])
        return scores[low], scores[high]

    def votes(self, document):
        if not self.blocks[document]:
            return [0] * self.layers
        by_layer = [[one[0] for one in self.importance(layer, document)] for layer in range(self.layers)]
        ranks = np.mean([np.argsort(np.argsort(alphas)) for alphas in by_layer], axis=0)
        best = int(np.argmin(ranks))
        return [int(self.standing_out(layer, document)[best]) for layer in range(self.layers)]

    def stable(self):
        count = self.options.get("stable_layers") or math.ceil(self.layers / 8)
        votes = np.sum([self.votes(document) for document in range(len(self.documents))], axis=0)
        upper = range(min(self.layers // 2, self.layers - count), self.layers)
        return sorted(sorted(upper, key=lambda layer: (votes[layer], layer))[-count:])

    def outliers(self):
        return {
            self.importance(layer, document)[rank][2]
            for layer in self.stable()
            for document in range(len(self.documents))
            for rank in np.flatnonzero(self.standing_out(layer, document))
        }


@pytest.mark.parametrize("options", [{}, {"update": "overwrite", "stable_layers": 2, "recompute": "all"}], ids=str)
def test_sidecars_are_appendix_a_written_twice(family, options):
    lm, oracle = family
    prompt = random_prompt(3, chunks=CHUNKS)
    written = WithSidecars(oracle, prompt, {"update": "fusion", **SIZES, **options})
    fused = rc.fuse(lm, prompt, "samkv", surveyed(lm, prompt), **SIZES, **options)
    assert fused.kept_tokens == tuple(len(kept) + len(prompt.suffix_ids) for kept in written.kept)
    assert_like(step_by_step(lm, fused, ANSWER), written.logits())
    # Sidecars have the local queries, so the suffix alone runs in the generic pass.
    again = [len(written.again & set.union(*written.kept[layer:])) for layer in range(written.layers)]
    assert fused.computed_tokens == tuple(2 * len(prompt.suffix_ids) + count for count in again)


@pytest.mark.parametrize("recipe", ["isolated", "prefix"])
def test_without_what_appendix_a_says_sidecars_change_nothing(family, recipe):
    """Scores by mean keys equal those by all keys."""
    lm, _ = family
    prompt = random_prompt(4, chunks=CHUNKS)
    options = {**SIZES, "top_p": 0.5, "personalized_bias": False, "recompute": "all", "update": "overwrite"}
    plain = rc.fuse(lm, prompt, "samkv", recipe=recipe, **options)
    beside = rc.fuse(lm, prompt, "samkv", surveyed(lm, prompt, recipe=recipe), **options)
    assert beside.kept_tokens == plain.kept_tokens
    assert beside.computed_tokens == plain.computed_tokens
    assert_like(step_by_step(lm, beside, ANSWER), step_by_step(lm, plain, ANSWER))


def test_local_queries_are_those_of_the_passages_own_place(llama):
    """Local queries that are rotated to the passage's place equal the passage's queries there, with and without a
    prefix.
    """
    prompt = random_prompt(5, chunks=(40,))
    (alone,), (behind,) = (surveyed(llama, prompt, recipe=recipe) for recipe in ("isolated", "prefix"))
    assert not torch.allclose(alone.sidecar.local_query[1], behind.sidecar.local_query[1], atol=1e-4)
    # Layer 0 does not depend on the text before.
    torch.testing.assert_close(alone.sidecar.local_query[0], behind.sidecar.local_query[0], atol=1e-5, rtol=1e-5)


def lines(slow=None):
    """Return the attention to 40 tokens, in blocks of two from token 4 on: that to one token hardly falls, and that to
    token 20 is small.
    """
    weights, far = np.full((40, 40), 1e-6), np.arange(1, 41.0)
    for token in range(40):
        exponent = 0.1 if token == slow else 1.5 + 0.1 * math.sin(token)
        scale = 1e-4 if token in (20, 21) else 0.2
        weights[token + 1 :, token] = scale * far[: 39 - token] ** -exponent
    return importance(torch.tensor(weights, dtype=torch.float32), 4, 28, 2)


def test_attention_that_falls_slowly_makes_a_block_important_and_its_token_an_outlier():
    found = lines(slow=10)
    assert (found.most, found.least) == ((10 - 4) // 2, (20 - 4) // 2)
    assert found.outliers.nonzero()[:, 0].tolist() == [10]
    np.testing.assert_allclose(found.alphas[found.most], 0.1, atol=1e-4)
    assert stable_layers([found.alphas, lines().alphas, found.alphas]).tolist() == [True, False, True]
    assert not lines().outliers.any()


class Counted(torch.Tensor):
    """A tensor of numbers off the device, which counts the numbers that operations read; views are not operations."""

    num_bytes = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        made = super().__torch_function__(function, types, args, kwargs or {})
        if not isinstance(made, cls):
            return made
        sources = {one.untyped_storage().data_ptr() for one in tree_leaves((args, kwargs)) if isinstance(one, cls)}
        if made.untyped_storage().data_ptr() in sources:
            return made
        Counted.num_bytes += made.nbytes
        return made.as_subclass(torch.Tensor)


def test_few_of_the_bytes_are_read(tmp_path):
    """Passages have 25 to 27 blocks: at most 15 % of the KV is read, mean keys included."""
    lm = rc.load_lm(save_tiny_llama(tmp_path, positions=4096))
    sizes = {"block_size": 16, "initial_blocks": 1, "local_blocks": 1}
    prompt = random_prompt(6, prefix=4, chunks=(400, 420, 405, 430, 425, 410), suffix=8)
    blocks = surveyed(lm, prompt, sizes)
    whole = sum(block.kv.num_bytes for block in blocks)
    plain = [block.kv.map(lambda tensor: tensor.as_subclass(Counted)) for block in blocks]
    beside = [SurveyedBlock(kv, block.sidecar) for kv, block in zip(plain, blocks, strict=True)]
    shares = {}
    for name, given in (("sidecars", beside), ("all keys", plain)):
        Counted.num_bytes = 0
        fused = rc.fuse(lm, prompt, "samkv", given, **sizes, top_p=0.2)
        shares[name] = Counted.num_bytes / whole
        kept = sum(fused.kept_tokens) / len(fused.kept_tokens) / prompt.num_tokens
        assert shares[name] >= 0.9 * kept, "what is kept was not counted"
    shares["sidecars"] += sum(block.sidecar.mean_keys.nbytes for block in blocks) / whole
    assert shares["sidecars"] <= 0.15
    assert shares["all keys"] > 0.5


def test_a_file_holds_block_and_sidecar(llama, tmp_path):
    codec = get_codec("samkv")
    prompt = random_prompt(7, chunks=(30,))
    (block,) = surveyed(llama, prompt)
    written = write_block(tmp_path / "block", "a" * 64, block, codec)
    found = read_block(tmp_path / "block", "a" * 64)
    assert isinstance(found, SurveyedBlock)
    for one in (found, written):
        assert same(one, block)
        assert all(torch.equal(one.sidecar.tensors[name], own) for name, own in block.sidecar.tensors.items())
    assert found.num_bytes == block.kv.num_bytes + block.sidecar.num_bytes
    assert codec_of(found).name == "samkv", "what is written late, or copied, would lose its sidecar"


@pytest.mark.parametrize("name", [one.name for one in fields(Sidecar)])
def test_a_sidecar_of_another_block_is_damage(llama, name):
    (block,) = surveyed(llama, random_prompt(7, chunks=(30,)))
    tensors = dict(get_codec("samkv").encode(block))
    held = tensors[f"sidecar.{name}"]
    cut = held[:, :, 1:] if name == "mean_keys" else held[1:]
    for broken in (tensors | {f"sidecar.{name}": cut}, {k: v for k, v in tensors.items() if k != f"sidecar.{name}"}):
        with pytest.raises(DamagedBlockError, match="sidecar"):
            get_codec("samkv").decode(broken)


def test_blocks_cut_in_another_way_are_read_without_their_sidecars(llama):
    prompt = random_prompt(8, chunks=CHUNKS)
    blocks = surveyed(llama, prompt)
    options = {**SIZES, "block_size": 4}
    expected = rc.fuse(llama, prompt, "samkv", [block.kv for block in blocks], **options)
    found = rc.fuse(llama, prompt, "samkv", blocks, **options)
    assert torch.equal(found.next_logits, expected.next_logits)
    mixed = rc.fuse(llama, prompt, "samkv", [blocks[0].kv, *blocks[1:]], **SIZES)
    assert torch.equal(mixed.next_logits, rc.fuse(llama, prompt, "samkv", [b.kv for b in blocks], **SIZES).next_logits)


TEXT = "The harbour of Aabo is old. Its ships sail for Brugge in spring, and for Chur when the wind has turned."


def test_a_store_keeps_sidecars_from_ingestion_on(open_kb):
    """All other methods read the same blocks; sidecars are deleted with their document."""
    store = rc.StoreConfig(codec="samkv")
    texts = {name: TEXT.replace("Aabo", name) for name in ("Aabo", "Evora", "Delft")}
    open_kb(store=store, texts=texts).close()
    kb, asked = open_kb(store=store), {"k": 3, "sampling": rc.Sampling(max_tokens=4)}
    handles = [hit.handle for hit in kb.retrieve("Where do ships sail?", k=3)]
    held = [kb.store.kv.get(handle).block for handle in handles]
    assert all(isinstance(block, SurveyedBlock) for block in held)
    assert kb.ask("Where do ships sail?", method="samkv", **asked).method == "samkv"
    assert kb.ask("Where do ships sail?", method="reposition", **asked).usage.computed_tokens
    kb.delete(list(texts))
    assert not set(kb.store.kv.keys()) & set(handles)
