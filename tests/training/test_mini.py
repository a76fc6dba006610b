"""The bundled mini model answers held-out questions, loaded as any Hugging Face directory is."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragcache.prompt import prompt_format
from ragcache.training.evaluate import MINI, draw_cases, exact_matches, load
from ragcache.training.tokenizer import build_tokenizer


@pytest.fixture(scope="module")
def mini():
    return load(MINI)


@pytest.mark.parametrize(("hops", "num_cases", "least"), [(1, 100, 0.97), (2, 60, 0.92)])
def test_answers_over_eight_passages(mini, hops, num_cases, least):
    model, tokenizer = mini
    cases = draw_cases(tokenizer, hops=hops, num_cases=num_cases)
    assert all(len(case.chunk_ids) == 8 for case in cases)
    assert sum(exact_matches(model, tokenizer, cases)) / num_cases >= least


def test_without_the_gold_passages_it_cannot_answer(mini):
    """The control: what is measured is reading, not memory."""
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
    assert (MINI / "tokenizer.json").read_text(encoding="utf-8") == build_tokenizer().to_str(pretty=True)
    model = AutoModelForCausalLM.from_pretrained(MINI, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert sum(path.stat().st_size for path in MINI.rglob("*") if path.is_file()) < 12_000_000
