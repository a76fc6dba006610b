"""Answers of a given form: JSON that a validator accepts, matches of Python's `re`, one of the choices."""

import json
import re

import jsonschema
import pytest
import torch
from covering import covering
from tiny_model import save_tiny_llama

import ragcache as rc
from ragcache.errors import ConfigError
from ragcache.models.card import eos_token_ids
from ragcache.models.generate import decode
from ragcache_demo.bag_of_words import BagOfWords

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "tags"],
    "additionalProperties": False,
}
PROMPT = "The cat sat on the mat."


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return rc.load_lm(save_tiny_llama(tmp_path_factory.mktemp("structured") / "tiny"))


def written(lm, sampling, prompt=PROMPT):
    """Ids of the answer behind a raw prompt, read in full."""
    ids = lm.tokenizer.encode(prompt)
    fused = rc.fuse(lm, rc.Prompt([], [ids[:-4]], ids[-4:]), method="full")
    steps = decode(lm, fused.cache, fused.next_logits, len(ids), sampling, eos_ids=eos_token_ids(lm))
    return list(steps), fused.next_logits


def text_of(lm, ids):
    return lm.tokenizer.decode(ids)


@pytest.mark.parametrize(("seed", "temperature"), covering(range(5), [0.0, 1.5]))
def test_json_holds_to_its_schema(lm, temperature, seed):
    sampling = rc.Sampling(max_tokens=300, temperature=temperature, seed=seed, json_schema=SCHEMA)
    ids, _ = written(lm, sampling, PROMPT + str(seed))
    jsonschema.validate(json.loads(text_of(lm, ids)), SCHEMA)


def test_any_json_object():
    sampling = rc.Sampling(json_schema='{"type": "object"}')
    assert sampling == rc.Sampling(json_schema={"type": "object"})
    assert len({sampling, rc.Sampling(json_schema={"type": "object"})}) == 1


@pytest.mark.parametrize("expression", [r"[0-9]{3}-[0-9]{2}", r"(yes|no), (sir|madam)[.!]", "a+b?c{2,3}"])
def test_a_match_of_the_expression(lm, expression):
    ids, _ = written(lm, rc.Sampling(max_tokens=40, temperature=1.0, seed=3, regex=expression))
    found = re.fullmatch(expression, text_of(lm, ids))
    assert found or len(ids) == 40  # cut in mid-form: "a+" may go on and on


def plain_choice(lm, choices):
    """Greedy among the tokens that go on with some choice, written out; every byte is a token."""
    ids, eos = lm.tokenizer.encode(PROMPT), min(eos_token_ids(lm))
    wanted = [[*lm.tokenizer.encode(one, add_special_tokens=False), eos] for one in choices]
    said: list[int] = []
    while eos not in said:
        with torch.no_grad():
            logits = lm.model(torch.tensor([[*ids, *said]])).logits[0, -1]
        allowed = sorted({one[len(said)] for one in wanted if one[: len(said)] == said})
        said.append(allowed[int(logits[allowed].argmax())])
    return said[:-1]


@pytest.mark.parametrize("choices", [["yes", "no", "maybe"], ["a", "ab", "abc"], ['quo"te', "new\nline", "é"]])
def test_the_likeliest_way_through_the_choices(lm, choices):
    ids, _ = written(lm, rc.Sampling(max_tokens=40, choices=choices))
    assert ids == plain_choice(lm, choices)
    assert text_of(lm, ids) in choices


def test_a_form_that_forbids_nothing_changes_nothing(lm):
    free, _ = written(lm, rc.Sampling(max_tokens=12))
    text = text_of(lm, free)
    kept, _ = written(lm, rc.Sampling(max_tokens=12, regex="(.|\n)*"))
    valid = len(text.split("�")[0].encode())  # an expression is over characters: no half ones
    assert kept[:valid] == free[:valid]


def test_methods_of_every_kind_write_it(lm, tmp_path):
    with rc.RagCache.open(tmp_path / "kb", model=lm, embedder=BagOfWords()) as kb:
        kb.ingest([rc.Document("a", "The cat sat on the mat."), rc.Document("b", "Dogs bark at night.")])
        for name in ("full", "epic", "cacheblend", "samkv"):  # one that reads text, and each way to read blocks
            answer = kb.ask("Cat?", k=2, method=name, sampling=rc.Sampling(max_tokens=300, json_schema=SCHEMA))
            jsonschema.validate(json.loads(answer.text), SCHEMA)
            assert answer.finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"json_schema": {"type": "strange"}}, "json_schema cannot be compiled"),
        ({"json_schema": "{"}, "json_schema is no JSON"),
        ({"json_schema": "[1]"}, "no JSON object"),
        ({"json_schema": {"a": {1, 2}}}, "json_schema is no JSON"),
        ({"regex": "(a"}, "regex cannot be compiled"),
        ({"regex": "a" * (1 << 21)}, "1048576 are the most"),
        ({"choices": []}, "at least one"),
        ({"choices": ["a", ""]}, "something in them"),
        ({"choices": ["a"], "regex": "a"}, "exclude each other"),
    ],
)
def test_what_cannot_be_compiled_is_said_at_once(fields, said):
    with pytest.raises(ConfigError, match=said):
        rc.Sampling(**fields)


def test_a_model_without_an_end_is_refused(lm):
    ids = lm.tokenizer.encode(PROMPT)
    fused = rc.fuse(lm, rc.Prompt([], [ids[:-4]], ids[-4:]), method="full")
    with pytest.raises(ConfigError, match="could not end"):
        list(decode(lm, fused.cache, fused.next_logits, len(ids), rc.Sampling(choices=["a"])))
