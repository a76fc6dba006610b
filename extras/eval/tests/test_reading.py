"""A single pass over an answer gives its tokens' logits, and whether the model would write it."""

import pytest
import torch
from adapters import save_adapter
from families import load_tiny, oracle_model, random_prompt, save_tiny

import ragcache as rc
from ragcache.errors import ConfigError
from ragcache.fusion import get_method
from ragcache.models.generate import decode
from ragcache.models.sampler import Sampling
from ragcache.models.trained_tokens import TrainedTokens
from ragcache_eval.methods import MethodSpec
from ragcache_eval.reading import PromptReader, forced_logits

LENGTH = 6


@pytest.fixture(scope="module", params=["llama", "gemma3", "gpt_oss", "mixtral"])
def model(request, tmp_path_factory):
    return load_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("method", ["full", "epic", "ape"])
def test_forced_logits_choose_the_greedy_answer_and_no_other(model, method):
    lm, _ = model
    fused = rc.fuse(lm, random_prompt(3), method=method)
    held = list(fused.cache.lengths)
    logits = fused.next_logits
    written = list(
        decode(lm, fused.cache, logits, fused.next_position, Sampling(max_tokens=LENGTH), eos_ids=frozenset())
    )
    fused = rc.fuse(lm, random_prompt(3), method=method)
    assert forced_logits(lm, fused, written).argmax(-1).tolist() == written
    for place in range(LENGTH):
        other = [*written]
        other[place] = (other[place] + 1) % lm.vocab_size
        assert forced_logits(lm, fused, other).argmax(-1).tolist() != other
    assert list(fused.cache.lengths) == held


def test_forced_logits_are_a_plain_forward_over_prompt_and_answer(model):
    lm, oracle = model
    prompt, answer = random_prompt(4), [7, 11, 5]
    with torch.no_grad():
        expected = oracle(input_ids=torch.tensor([[*prompt.ids, *answer]])).logits[0, prompt.num_tokens - 1 : -1]
    got = forced_logits(lm, rc.fuse(lm, prompt, method="full"), answer)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_ids_that_no_answer_may_hold_have_no_probability(tmp_path):
    """Gemma 3's head is its embedding, so an adapter's rows would be the likeliest tokens."""
    base = save_tiny("gemma3", tmp_path / "base")
    oracle = oracle_model(base)
    size = oracle.config.vocab_size
    spec = TrainedTokens("markers", doc_start_id=size, doc_end_id=size + 1, positions="reordered")
    rows = {id: 100 * oracle.get_input_embeddings().weight[7].detach() for id in (size, size + 1)}
    save_adapter(tmp_path / "adapter", base, spec, rows=rows)
    lm, prompt, answer = rc.load_lm(tmp_path / "adapter"), random_prompt(4), [7, 11, 5]
    fused = rc.fuse(lm, prompt, method="full")
    got = forced_logits(lm, fused, answer)
    assert fused.next_logits[size:].abs().max() > got[0, :size].max(), "the head knows the rows"
    with torch.no_grad():
        expected = oracle(input_ids=torch.tensor([[*prompt.ids, *answer]])).logits[0, prompt.num_tokens - 1 : -1]
    torch.testing.assert_close(got[:, :size], expected, atol=1e-4, rtol=1e-4)
    assert (got[:, size:] == -torch.inf).all()
    assert torch.equal(forced_logits(lm, fused, answer[:1]), got[:1])


def test_passages_are_read_behind_what_the_questions_name(model):
    """All or the last of these texts precede a passage; some of them are no passages."""
    lm, _ = model
    prompt = random_prompt(3)
    prompt = rc.Prompt(prompt.prefix_ids, [[7, 8, 9], [10, 11], [12, 13, 14]], prompt.suffix_ids)
    behind = [[], [[7, 8, 9]], [[20, 21], [10, 11]]]
    reader = PromptReader(lm, prompt, 1, behind)
    for count, near in ((1, [[], behind[1], [[10, 11]]]), (2, behind), (5, behind)):
        fused, _ = reader.read(get_method("reposition"), neighbours=count)
        blocks = rc.encode(lm, prompt, rc.Recipe(neighbours=count), neighbours=near)
        assert torch.equal(fused.next_logits, rc.fuse(lm, prompt, "reposition", blocks).next_logits)
    alone, _ = reader.read(get_method("reposition"))
    assert torch.equal(alone.next_logits, rc.fuse(lm, prompt, "reposition").next_logits)
    assert not torch.allclose(fused.next_logits, alone.next_logits)


def test_neighbours_without_documents_and_without_blocks_are_refused(model):
    lm, _ = model
    reader = PromptReader(lm, random_prompt(3), 1)
    with pytest.raises(ConfigError, match=r"neighbours=1 .*set CasePassage.behind"):
        reader.read(get_method("reposition"), neighbours=1)
    with pytest.raises(ConfigError, match="'full' reads no blocks; leave neighbours=1 out"):
        MethodSpec.parse("full:neighbours=1")
    with pytest.raises(ConfigError, match="choose 0 or more"):
        MethodSpec.parse("reposition:neighbours=-1")
    assert MethodSpec.parse("a3:neighbours=2:ratio=0.2").neighbours == 2
    assert MethodSpec.parse("a3:neighbours=2").key != MethodSpec.parse("a3").key
