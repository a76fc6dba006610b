"""Ids for link tokens and markers: reserved ids of the tokenizer if there are enough, else new ids.

A Llama 3 vocabulary gets the ids of KVLink's own code (128011 + K * slot + place, 128254, 128255), so that its
checkpoints and this package's have the same layout.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import AddedToken, PreTrainedModel, PreTrainedTokenizerBase

from ragcache.errors import ConfigError
from ragcache.models.adapter import Adapter
from ragcache.models.trained_tokens import (
    KV_END,
    KV_START,
    LINK_NAME,
    LLAMA3_VOCABULARY,
    SECTION,
    TrainedTokens,
    grown,
)
from ragcache.prompt import list_controls

REUSES = ("link", "markers")
RESERVED = re.compile(
    r"<\|?(reserved_special_token|reserved_token|reserved|unused|SPECIAL|extra|extra_id|dummy|placeholder)_?\d+\|?>"
    r"|\[unused\d+\]|\[control_\d+\]"
)
NOISE = 1.0
"""Spread of new rows about the mean of all rows, in standard deviations: a new token looks like any other word."""


def choose_spec(
    tokenizer: PreTrainedTokenizerBase,
    reuse: str,
    link_tokens: int,
    link_slots: int,
    positions: str,
) -> TrainedTokens:
    """Return ids for a way of reuse; adds tokens to the tokenizer if it has too few reserved ids.

    reuse: "link" (with link_tokens 0: Block-Attention, which has no ids) or "markers"

    Raises ConfigError for an unknown name, or numbers out of range.
    """
    if reuse not in REUSES:
        raise ConfigError(f"reuse is {reuse!r}; it must be one of {', '.join(REUSES)}")
    if reuse == "markers":
        start, end = _ids(tokenizer, ["<|doc_start|>", "<|doc_end|>"])
        return TrainedTokens("markers", doc_start_id=start, doc_end_id=end, positions=positions)
    return _link_spec(tokenizer, link_tokens, link_slots)


def _link_spec(tokenizer: PreTrainedTokenizerBase, link_tokens: int, link_slots: int) -> TrainedTokens:
    if link_tokens == 0:
        return TrainedTokens("reposition")
    if link_tokens < 0 or link_slots < 1:
        raise ConfigError(
            f"link_tokens is {link_tokens} and link_slots {link_slots}; they must be at least 0 and at least 1"
        )
    if _is_llama3(tokenizer):
        return _llama3_spec(link_tokens, link_slots)
    names = [LINK_NAME.format(slot + 1, place + 1) for slot in range(link_slots) for place in range(link_tokens)]
    *links, start, end = _ids(tokenizer, [*names, KV_START, KV_END])
    return TrainedTokens("link", "isolated", link_tokens, link_slots, links[0], start, end)


def _is_llama3(tokenizer: PreTrainedTokenizerBase) -> bool:
    if len(tokenizer) < LLAMA3_VOCABULARY:  # it may be larger, by tokens that found no reserved ids
        return False
    spec = TrainedTokens.llama3(1)
    tokens = tokenizer.convert_ids_to_tokens(sorted(spec.added_ids))
    return all(RESERVED.fullmatch(token) for token in tokens)


def _llama3_spec(link_tokens: int, link_slots: int) -> TrainedTokens:
    spec = TrainedTokens.llama3(link_tokens)
    if link_slots > spec.link_slots:
        raise ConfigError(
            f"a Llama 3 vocabulary has link tokens for {spec.link_slots} passages at {link_tokens} each; "
            f"train with at most {spec.link_slots} link slots"
        )
    return spec


def _ids(tokenizer: PreTrainedTokenizerBase, names: list[str]) -> list[int]:
    """Return consecutive ids, an id for each name."""
    known = tokenizer.get_vocab()
    taken = [known[name] for name in names if name in known]
    if len(taken) == len(names) and _in_a_row(taken):
        return taken  # trained before
    reserved = _longest_run(_reserved_ids(tokenizer))
    if len(reserved) >= len(names):
        return reserved[: len(names)]
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in names], special_tokens=True)
    list_controls.cache_clear()
    ids: list[int] = tokenizer.convert_tokens_to_ids(names)
    if not _in_a_row(ids):
        raise ConfigError("the tokenizer does not number new tokens in a row; its vocabulary holds some of their names")
    return ids


def _reserved_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    used = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    added = tokenizer.added_tokens_decoder
    return sorted(i for i, token in added.items() if RESERVED.fullmatch(str(token)) and i not in used)


def _longest_run(ids: Iterable[int]) -> list[int]:
    best: list[int] = []
    run: list[int] = []
    for i in ids:
        run = [*run, i] if run and i == run[-1] + 1 else [i]
        best = run if len(run) > len(best) else best
    return best


def _in_a_row(ids: list[int]) -> bool:
    return ids == list(range(ids[0], ids[0] + len(ids)))


def prepare_model(model: PreTrainedModel, spec: TrainedTokens, seed: int) -> None:
    """Grow the embedding by the ids that it lacks, draw their rows, and write the section into the configuration.

    Tied heads stay tied. An id that had the same role in an earlier training keeps its row.
    """
    before, roles = TrainedTokens.of(model.config), spec.roles
    earlier = {} if before is None else before.roles
    old_size = model.get_input_embeddings().weight.shape[0]
    new_size = grown(old_size, roles)
    if new_size > old_size:
        model.resize_token_embeddings(new_size, mean_resizing=False)
    fresh = sorted({*range(old_size, new_size), *(id for id, role in roles.items() if earlier.get(id) != role)})
    if fresh:
        _start_rows(model, fresh, seed)
    setattr(model.config, SECTION, spec.section())


@torch.no_grad()
def take_rows(model: PreTrainedModel, spec: TrainedTokens, earlier: Adapter) -> None:
    """Copy the rows of an earlier adapter to the tokens with the same roles, whatever their ids were there."""
    embeddings: Tensor = model.get_input_embeddings().weight
    rows = earlier.rows()
    held = {role: rows[id] for id, role in earlier.spec.roles.items()}
    for id, role in spec.roles.items():
        if role in held:
            embeddings[id] = held[role].to(embeddings)


@torch.no_grad()
def _start_rows(model: PreTrainedModel, ids: list[int], seed: int) -> None:
    """Draw embeddings about the mean of all others. Rows of an untied head become its mean, so that no id is likely."""
    embeddings: Tensor = model.get_input_embeddings().weight
    others = torch.ones(embeddings.shape[0], dtype=torch.bool, device=embeddings.device)
    others[ids] = False
    generator = torch.Generator().manual_seed(seed)
    rows = embeddings[others].float()
    noise = torch.randn(len(ids), rows.shape[1], generator=generator).to(rows.device)
    embeddings[ids] = (rows.mean(0) + NOISE * rows.std(0) * noise).to(embeddings.dtype)
    head: Tensor = model.get_output_embeddings().weight
    if head.data_ptr() != embeddings.data_ptr():
        head[ids] = head[others].float().mean(0).to(head.dtype)
