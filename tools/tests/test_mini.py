"""The bundled models answer held-out questions: as any Hugging Face directory, and the linked model over reused KV."""

import pytest
import torch
from kit.makers import made_by
from transformers import AutoModelForCausalLM, AutoTokenizer

import ragcache as rc
from ragcache.models.card import eos_token_ids
from ragcache.models.generate import decode
from ragcache.models.sampler import Sampling
from ragcache.prompt import prompt_format
from ragcache_eval.registry.questions import MAX_ANSWER_TOKENS
from tools.mini.evaluate import MINI, MINI_BASE, draw_cases, exact_matches, load
from tools.mini.tokenizer import build_tokenizer

BUNDLE_BYTES = 40_000_000
KINDS = {"single": {"hops": 1}, "two-hop": {"hops": 2}, "leaning": {"kind": "leaning"}}


@pytest.fixture(scope="module", params=[MINI_BASE, MINI], ids=["base", "linked"])
def mini(request):
    return load(request.param)


linked = made_by(rc.load_lm, "mini")


base = made_by(rc.load_lm, "mini-base")


def share_right(lm, method, kind, num_cases):
    """Return the share of held-out questions over eight passages that are answered right."""
    _, tokenizer = load(MINI_BASE)
    cases = draw_cases(tokenizer, num_cases=num_cases, **KINDS[kind])
    never = frozenset() if lm.reuse is None else lm.reuse.added_ids
    return sum(answer(lm, tokenizer, case, method, never) == case.answer for case in cases) / num_cases


def answer(lm, tokenizer, case, method, never):
    prompt = rc.Prompt(case.prefix_ids, case.chunk_ids, case.suffix_ids)
    fused = rc.fuse(lm, prompt, method=method, reserve_tokens=MAX_ANSWER_TOKENS)
    sampling = Sampling(max_tokens=MAX_ANSWER_TOKENS)
    ids = decode(
        lm, fused.cache, fused.next_logits, fused.next_position, sampling, eos_ids=eos_token_ids(lm), never=never
    )
    text = tokenizer.decode(list(ids), skip_special_tokens=True)
    fused.cache.release()
    return text


@pytest.mark.slow
@pytest.mark.parametrize(("hops", "num_cases", "least"), [(1, 60, 0.95), (2, 40, 0.92)])
def test_answers_over_eight_passages(mini, hops, num_cases, least):
    model, tokenizer = mini
    cases = draw_cases(tokenizer, hops=hops, num_cases=num_cases)
    assert all(len(case.chunk_ids) == 8 for case in cases)
    assert sum(exact_matches(model, tokenizer, cases)) / num_cases >= least


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_cases", "least"), [("single", 60, 0.95), ("two-hop", 40, 0.9), ("leaning", 40, 0.9)]
)
def test_link_tokens_answer_over_eight_passages(linked, kind, num_cases, least):
    assert linked.default_method == "link"
    assert share_right(linked, "link", kind, num_cases) >= least


@pytest.mark.slow
def test_the_base_reads_cut_sentences_together_only(base):
    """This is the need for link tokens: read apart, the halves of a sentence state nothing."""
    assert base.reuse is None
    assert share_right(base, "full", "leaning", 30) >= 0.9
    assert share_right(base, "reposition", "leaning", 30) <= 0.6


@pytest.mark.slow
def test_without_the_gold_passages_it_cannot_answer(mini):
    """This is the control: the questions measure reading, not memory."""
    model, tokenizer = mini
    cases = [
        case._replace(chunk_ids=[ids for ids in case.chunk_ids if value_ids(tokenizer, case) not in windows(ids)])
        for case in draw_cases(tokenizer, hops=1, num_cases=40)
    ]
    assert sum(exact_matches(model, tokenizer, cases)) / len(cases) <= 0.1


def value_ids(tokenizer, case):
    return tuple(tokenizer.encode(case.question.value).ids)


def windows(ids):
    return {tuple(ids[start:end]) for end in range(len(ids) + 1) for start in range(max(0, end - 12), end)}


def test_the_chat_template_gives_the_prompt_of_a_case(mini):
    _, fast = mini
    tokenizer = AutoTokenizer.from_pretrained(MINI)
    case = draw_cases(fast, hops=1, num_cases=1)[0]
    passages = "".join(fast.decode(ids) for ids in case.chunk_ids)
    messages = [{"role": "user", "content": f"{passages}Question: {case.question.text}"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert prompt == case.input_ids


def test_the_engine_makes_the_prompt_of_a_case(mini):
    _, fast = mini
    tokenizer = AutoTokenizer.from_pretrained(MINI)
    case = draw_cases(fast, hops=1, num_cases=1)[0]
    engine = prompt_format(tokenizer)
    assert list(engine.prefix_ids) == case.prefix_ids
    assert engine.suffix_ids(tokenizer, case.question.text) == case.suffix_ids


def test_the_files_are_those_of_this_recipe():
    assert (MINI_BASE / "tokenizer.json").read_text(encoding="utf-8") == build_tokenizer().to_str(pretty=True)
    for directory in (MINI_BASE, MINI):
        assert AutoModelForCausalLM.from_pretrained(directory, dtype="auto").dtype == torch.bfloat16
    files = [path for directory in (MINI_BASE, MINI) for path in directory.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < BUNDLE_BYTES
