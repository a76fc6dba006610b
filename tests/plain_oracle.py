"""Answers of plain transformers, token by token."""

from functools import cache

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ragcache as rc


@cache
def plain_transformers(directory):
    """The model and its tokenizer, without any of ours. For directories whose files do not change."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return model.eval(), AutoTokenizer.from_pretrained(directory)


def greedy(model, tokenizer, prompt, allowed, count, **more):
    """The text of `greedy_ids`."""
    return tokenizer.decode(greedy_ids(model, tokenizer, prompt, allowed, count, **more))


def greedy_ids(model, tokenizer, prompt, allowed, count, *, positions=None, never=()):
    """Token by token, each a plain forward of everything under an explicit mask; None: all see what is before them.

    positions: of the prompt's tokens; 0, 1, ... when absent
    never: ids that are ruled out
    """
    ids, places, made = list(prompt.ids), list(positions or range(prompt.num_tokens)), []
    while len(made) < count:
        n = len(ids)
        mask = torch.ones(n, n, dtype=torch.bool).tril()
        if allowed is not None:
            mask[: allowed.shape[0], : allowed.shape[0]] = allowed
        bias = torch.zeros(n, n).masked_fill(~mask, torch.finfo(torch.float32).min)[None, None]
        with torch.no_grad():
            out = model(input_ids=torch.tensor([ids]), position_ids=torch.tensor([places]), attention_mask=bias)
        logits = out.logits[0, -1]
        logits[list(never)] = -torch.inf
        token = int(logits.argmax())
        if token == tokenizer.eos_token_id:
            break
        ids.append(token)
        places.append(places[-1] + 1)
        made.append(token)
    return made


def continued(directory, ids, passages, count=8):
    """The text of `greedy` where every token sees all before it, those of passages (spans) their own passage alone."""
    allowed = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    for start, end in passages:
        allowed[start:end, :start] = False
    return greedy(*plain_transformers(directory), rc.Prompt(ids[:1], [], ids[1:]), allowed, count)


def places(ids, hits):
    """Where each passage's tokens stand, in order."""
    found = []
    for wanted in (list(hit.chunk.token_ids) for hit in hits):
        last = found[-1][1] if found else 0
        start = next(at for at in range(last, len(ids)) if ids[at : at + len(wanted)] == wanted)
        found.append((start, start + len(wanted)))
    return found


def assert_read_behind(block, oracle, before, token_ids):
    """A block's values are those of one plain forward over what the chunk is read behind, and the chunk."""
    ids = [id for one in [*before, token_ids] for id in one]
    with torch.no_grad():
        cache = oracle(input_ids=torch.tensor([ids]), use_cache=True).past_key_values
    assert block.num_tokens == len(token_ids)
    assert block.num_layers == len(cache.layers)
    for layer in range(block.num_layers):
        expected = cache.layers[layer].values[0, :, -len(token_ids) :]
        torch.testing.assert_close(block.layer_values(layer), expected, atol=1e-5, rtol=1e-4)
