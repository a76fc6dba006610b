"""SamKV against a second implementation of the paper: plain transformers, a mask per layer, loops over blocks."""

import math

import pytest
import torch
from families import METHOD_FAMILIES, block_diagonal, random_prompt, tiny
from formula_oracle import Plan, planned_logits, step_by_step
from kit.makers import each, made_by
from paper_oracles import assert_like, with_formula

import ragcache as rc
from ragcache.errors import ConfigError

CHUNKS = (25, 38, 11, 31)
SIZES = {"block_size": 3, "initial_blocks": 1, "local_blocks": 2}
EVERYTHING = {**SIZES, "top_p": 1, "cross_filter": False}
ANSWER = [5, 77, 31]


family = each(METHOD_FAMILIES, with_formula, scope="module")


llama = made_by(lambda: tiny("llama")[0])


def flat(lists):
    return [item for one in lists for item in one]


class Written:
    """A second implementation of the paper. All lists are by layer; token sets are sets of positions."""

    def __init__(self, model, prompt, options):
        self.model, self.prompt, self.options = model, prompt, options
        self.ids = [*prompt.ids, *ANSWER]
        self.n, self.context = len(self.ids), prompt.context_tokens
        self.causal = torch.ones(self.n, self.n, dtype=torch.bool).tril()
        alone = self.causal.clone()
        alone[: prompt.num_tokens, : prompt.num_tokens] = block_diagonal(prompt)
        plan = Plan(alone, torch.arange(self.n))
        planned_logits(model, self.ids, plan)
        self.alone, self.old = plan, plan.kv
        self.layers = len(plan.kv)
        self.cut()
        self.scores = [self.score(layer, query) for layer, query in sorted(self.generic_queries().items())]
        self.kept = self.select()
        self.again = self.recomputed()

    def cut(self):
        size = self.options["block_size"]
        self.anchors, self.local, self.blocks = [], [], []
        start = len(self.prompt.prefix_ids)
        self.documents = []
        for chunk in self.prompt.chunk_ids:
            tokens = list(range(start, start + len(chunk)))
            self.documents.append(set(tokens))
            head = self.options["initial_blocks"] * size
            tail = max(head, len(tokens) - self.options["local_blocks"] * size)
            middle = tokens[head:tail]
            self.anchors.append(tokens[:head] + tokens[max(head, tail) :])
            self.local.append(tokens[tail:])
            self.blocks.append([middle[i : i + size] for i in range(0, len(middle), size)])
            start += len(chunk)

    def generic_queries(self):
        """Return the queries of a pass over old KV in which all tokens see initial and local parts only."""
        seen = torch.zeros(self.n, dtype=torch.bool)
        seen[: len(self.prompt.prefix_ids)] = True
        seen[flat(self.anchors)] = True
        seen[self.context :] = True
        plan = Plan(self.causal & (seen[None] | torch.eye(self.n, dtype=torch.bool)), torch.arange(self.n))
        plan.change = self.with_old(lambda layer: set())
        planned_logits(self.model, self.ids, plan)
        return plan.queries

    def with_old(self, renewed):
        """Return a function that keeps the context tokens' old KV, except for tokens that are recomputed in a layer."""

        def change(layer, keys, values):
            theta = torch.zeros(self.n)
            theta[sorted(renewed(layer) | {*range(self.context, self.n)})] = 1.0
            out = []
            for old, new in zip(self.old[layer], (keys, values), strict=True):
                share = theta
                if self.options["update"] == "fusion":
                    share = theta.clone()
                    for tokens in self.documents:
                        again = sorted(renewed(layer) & tokens)
                        before, after = (part[:, :, again].flatten() for part in (old, new))
                        share[again] = torch.cosine_similarity(before, after, 0)
                share = share[None, None, :, None]
                out.append(share * new + (1 - share) * old)
            return tuple(out)

        return change

    def score(self, layer, query):
        """Return, for each document, scores by block and by middle token, and of the anchor: inner products with
        equation 1's vectors.
        """
        query, keys = query[0], self.old[layer][0][0]
        groups = query.shape[0] // keys.shape[0]
        generic = query[:, self.context : self.prompt.num_tokens].mean(1).flatten()
        local = [self.asking(layer, query)[:, tokens].mean(1).flatten() for tokens in self.local]
        out = []
        for i, blocks in enumerate(self.blocks):
            vector = generic.clone()
            if self.options.get("personalized_bias", True):
                for j, other in enumerate(local):
                    if j != i:
                        cosine = torch.dot(generic, other) / (generic.norm() * other.norm())
                        vector += abs(cosine) * other / (len(local) - 1)
            heads = (vector / vector.norm()).view(query.shape[0], -1)

            def product(tokens, heads=heads):
                return float((heads * keys[:, tokens].mean(1).repeat_interleave(groups, 0)).sum())

            by_token = {token: product([token]) for block in blocks for token in block}
            out.append(([product(block) for block in blocks], by_token, product(self.anchors[i])))
        return out

    def asking(self, layer, query):
        """Return the queries that local queries are taken from."""
        return query

    def low_and_high(self, layer, document):
        """Return the scores of the least and of the most important block."""
        blocks = self.scores[layer][document][0]
        return min(blocks), max(blocks)

    def stable(self):
        return range(self.layers - (self.options.get("stable_layers") or math.ceil(self.layers / 8)), self.layers)

    def share(self, document):
        if self.options.get("top_p") is not None:
            return self.options["top_p"]
        found = []
        for layer in self.stable():
            blocks, _, anchor = self.scores[layer][document]
            low, high = self.low_and_high(layer, document) if blocks else (0, 0)
            found.append((high - anchor) / (high - low) if low < anchor <= high else 0.0)
        return sum(found) / len(found)

    def select(self):
        kept = []
        for layer in range(self.layers):
            best = []
            for i, blocks in enumerate(self.blocks):
                ranked = sorted(zip(self.scores[layer][i][0], blocks, strict=True), key=lambda pair: -pair[0])
                best += ranked[: math.ceil(self.share(i) * len(blocks) - 1e-6)]
            if self.options.get("cross_filter", True):
                best = sorted(best, key=lambda pair: -pair[0])[: math.ceil(len(best) / len(self.blocks))]
            tokens = flat(self.anchors) + flat(block for _, block in best)
            kept.append({*range(len(self.prompt.prefix_ids)), *tokens})
        return kept

    def recomputed(self):
        prefix = set(range(len(self.prompt.prefix_ids)))
        everywhere = set.union(*self.kept) - prefix
        mode = self.options.get("recompute", "outliers")
        if mode != "outliers":
            return everywhere if mode == "all" else set()
        return (set(flat(self.anchors)) | self.outliers()) & everywhere

    def outliers(self):
        wanted = set()
        for i in range(len(self.blocks)):
            by_token = {
                token: sum(self.scores[layer][i][1][token] for layer in self.stable()) / len(self.stable())
                for token in self.scores[0][i][1]
            }
            values = torch.tensor(list(by_token.values()))
            high = values.mean() + 3 * values.std(unbiased=False) if by_token else 0
            wanted |= {token for token, value in by_token.items() if value > high}
        return wanted

    def logits(self):
        """Return the logits of the suffix's last token and of every answer token."""
        allowed = []
        for layer in range(self.layers):
            above = set.union(*self.kept[layer:]) & self.again
            mask = torch.zeros(self.n, self.n, dtype=torch.bool)
            mask[: self.context, sorted(self.kept[layer] | above)] = True
            mask[self.context :, sorted(self.kept[layer])] = True
            mask[self.context :, self.context :] = True
            allowed.append((mask | torch.eye(self.n, dtype=torch.bool)) & self.causal)
        plan = Plan(allowed, torch.arange(self.n))
        plan.change = self.with_old(lambda layer: self.kept[layer] & self.again)
        return planned_logits(self.model, self.ids, plan)[self.prompt.num_tokens - 1 :]


@pytest.mark.parametrize(
    "options",
    [
        {"update": "fusion"},
        {"update": "overwrite", "recompute": "all", "personalized_bias": False},
        {"update": "fusion", "top_p": 0.6, "recompute": "all", "stable_layers": 2},
        {"update": "overwrite", "cross_filter": False, "stable_layers": 3, "recompute": "none"},
    ],
    ids=["default", "all", "fused-all", "none"],
)
def test_samkv_is_the_paper_written_twice(family, options):
    lm, oracle = family
    prompt = random_prompt(3, chunks=CHUNKS)
    written = Written(oracle, prompt, {**SIZES, **options})
    fused = rc.fuse(lm, prompt, method="samkv", **SIZES, **options)
    assert fused.kept_tokens == tuple(len(kept) + len(prompt.suffix_ids) for kept in written.kept)
    assert_like(step_by_step(lm, fused, ANSWER), written.logits())
    assert len({frozenset(kept) for kept in written.kept}) > 1, "all layers keep the same: nothing is aligned"
    surveyed = len(prompt.suffix_ids)
    if options.get("personalized_bias", True):
        surveyed += len(flat(written.local))
    again = [len(written.again & set.union(*written.kept[layer:])) for layer in range(written.layers)]
    assert fused.computed_tokens == tuple(surveyed + count + len(prompt.suffix_ids) for count in again)


def test_keeping_everything_is_reposition_or_full_prefill(family):
    lm, oracle = family
    prompt = random_prompt(4, chunks=CHUNKS)
    n = prompt.num_tokens
    for recompute, allowed in (("none", block_diagonal(prompt)), ("all", torch.ones(n, n, dtype=torch.bool).tril())):
        expected = planned_logits(oracle, prompt.ids, Plan(allowed, torch.arange(n)))[-1]
        fused = rc.fuse(lm, prompt, method="samkv", recompute=recompute, update="overwrite", **EVERYTHING)
        assert_like(fused.next_logits, expected)
        assert set(fused.kept_tokens) == {n}


def test_one_chunk_behind_the_prefix_is_kept_whole(family):
    lm, oracle = family
    prompt = random_prompt(5, chunks=(60,))
    n = prompt.num_tokens
    expected = planned_logits(oracle, prompt.ids, Plan(torch.ones(n, n, dtype=torch.bool).tril(), torch.arange(n)))[-1]
    fused = rc.fuse(lm, prompt, method="samkv", recipe="prefix", block_size=2)
    assert_like(fused.next_logits, expected)
    assert set(fused.computed_tokens) == {len(prompt.suffix_ids)}


def test_the_defaults_keep_few_of_long_passages(llama):
    prompt = random_prompt(6, prefix=10, chunks=(90, 80, 95, 85, 90), suffix=10)
    fused = rc.fuse(llama, prompt, method="samkv", block_size=3)
    assert max(fused.kept_tokens) < 0.3 * prompt.num_tokens
    assert max(fused.computed_tokens) < 0.35 * prompt.num_tokens


def test_chunks_without_a_middle_are_kept(llama):
    prompt = random_prompt(7, chunks=(4, 1, 2))
    expected = rc.fuse(llama, prompt).next_logits
    torch.testing.assert_close(rc.fuse(llama, prompt, method="samkv", recompute="none").next_logits, expected)


def test_more_layers_than_there_are_are_refused(llama):
    with pytest.raises(ConfigError, match="stable_layers"):
        rc.fuse(llama, random_prompt(8), method="samkv", stable_layers=99)


def test_models_that_keep_latents_are_refused(load):
    for latent in ("deepseek_v2", "deepseek_v3"):
        with pytest.raises(ConfigError, match="keeps latents"):
            rc.fuse(load(latent)[0], random_prompt(5, chunks=(40, 30, 20)), "samkv")
