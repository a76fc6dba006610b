"""Prompts read from states equal the same prompts evaluated in place, by llama.cpp's own functions alone."""

import os
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from ragcache.fusion import get_method
from ragcache.kv.block_key import Recipe
from ragcache.models.deadline import NO_LIMIT
from ragcache.prompt import Prompt

llama_cpp = pytest.importorskip(
    "llama_cpp", reason="llama.cpp's laws need llama-cpp-python, which is built from source"
)
from ragcache_eval.reading import PromptReader, forced_logits, write_answer  # noqa: E402
from ragcache_llamacpp.entry import load  # noqa: E402
from ragcache_llamacpp.reading import Reading, prefill  # noqa: E402
from ragcache_llamacpp.sequences import same  # noqa: E402

PASSAGES, TOKENS, CELLS = 4, 40, 1024
MOST_KL, LEAST_SAME = 0.01, 0.95
REAL = {"smollm2": "RAGCACHE_TEST_SMOLLM2_GGUF", "qwen": "RAGCACHE_TEST_QWEN_GGUF"}
"""Environment variables that name the real models' files."""


class Oracle:
    """A context of llama.cpp that evaluates every token at its own position."""

    def __init__(self, path: Path, kv: int = llama_cpp.GGML_TYPE_F16) -> None:
        settings = llama_cpp.llama_model_default_params()
        settings.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
        given = llama_cpp.llama_context_default_params()
        given.n_ctx, given.n_batch, given.n_seq_max, given.n_threads, given.n_threads_batch = CELLS, CELLS, 16, 1, 1
        given.kv_unified = given.swa_full = True
        given.type_k = given.type_v = kv
        given.flash_attn_type = 1
        self.context = llama_cpp.llama_init_from_model(self.model, given)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def close(self) -> None:
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    def run(self, ids, position, sequence=0):
        batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for rank, id in enumerate(ids):
            batch.token[rank], batch.pos[rank], batch.n_seq_id[rank] = id, position + rank, 1
            batch.seq_id[rank][0], batch.logits[rank] = sequence, rank == len(ids) - 1
        assert llama_cpp.llama_decode(self.context, batch) == 0
        found = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.context, -1), (self.size,)).copy()
        llama_cpp.llama_batch_free(batch)
        return torch.from_numpy(found)

    def in_place(self, prefix, passages, question, before=()):
        """Return the logits after passages that see themselves and `before`, which is then removed, at their final
        positions.
        """
        llama_cpp.llama_memory_clear(self.memory, True)
        self.run(prefix, 0)
        at = len(prefix)
        for rank, ids in enumerate(passages, 1):
            if before:  # read behind `before`, then moved as a text is that was evaluated there
                self.run([*before, *ids], at - len(before), rank)
                llama_cpp.llama_memory_seq_rm(self.memory, rank, 0, at)
            else:
                self.run(ids, at, rank)
            at += len(ids)
        for rank in range(1, len(passages) + 1):
            llama_cpp.llama_memory_seq_cp(self.memory, rank, 0, -1, -1)
        return self.run(question, at)

    def whole(self, ids):
        llama_cpp.llama_memory_clear(self.memory, True)
        return self.run(ids, 0)


@pytest.fixture(params=["llama", "qwen2", "gemma3"])
def pair(request, files):
    lm, oracle = load(files[request.param], f"llama.cpp:n_ctx={CELLS},threads=1,n_gpu_layers=0,parallel=2"), None
    oracle = Oracle(files[request.param])
    yield lm, oracle
    oracle.close()


def kl(one: torch.Tensor, other: torch.Tensor) -> float:
    p, q = one.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum())


def texts(lm, seed, count=PASSAGES, tokens=TOKENS):
    draw = np.random.default_rng(seed).integers(0, 256, (count + 2, tokens)).tolist()
    return draw[0][:12], draw[2:], draw[1][:9]


def read(lm, method, prefix, passages, question, recipe="isolated"):
    """Return the logits after a prompt that is read from states made by `encode`."""
    made, recipe = get_method(method[0], **method[1]), lm.recipe(recipe)
    layout = made.layout(lm, Prompt(prefix, passages, question).parts, recipe)
    blocks = lm.encode(passages, recipe, prefix) if made.reuses_blocks else []
    reading = Reading(layout, made.reruns(layout) if made.reuses_blocks else ())
    usable = layout.usable if layout.separate else same
    with lm.admit(reading.elements, usable, [layout.num_tokens], NO_LIMIT) as [sequence]:
        known = len(sequence.elements)
        placed = {piece.start: block for piece, block in zip(layout.placed(), blocks, strict=True)}
        logits, _, computed = prefill(lm, sequence, reading, placed)
        sequence.keeps = True
    return logits, known, computed


def test_states_read_as_the_same_passages_evaluated_in_place(pair):
    lm, oracle = pair
    found = []
    for seed in range(100):
        prefix, passages, question = texts(lm, seed)
        logits, known, computed = read(lm, ("reposition", {}), prefix, passages, question)
        assert known + computed == len(prefix) + len(question)
        expected = oracle.in_place(prefix, passages, question)
        found.append((kl(expected, logits), int(logits.argmax() == expected.argmax())))
    assert max(one for one, _ in found) <= MOST_KL
    assert sum(one for _, one in found) >= LEAST_SAME * len(found)


def test_full_equals_a_plain_evaluation_with_and_without_a_known_beginning(pair):
    lm, oracle = pair
    for seed in range(10):
        prefix, passages, question = texts(lm, seed)
        for asked in (question, question[::-1]):
            logits, known, computed = read(lm, ("full", {}), prefix, passages, asked)
            expected = oracle.whole([*prefix, *chain(*passages), *asked])
            assert kl(expected, logits) <= MOST_KL
        assert known >= len(prefix) + PASSAGES * TOKENS, "the second question finds the first one's context"
        assert known + computed == len(prefix) + PASSAGES * TOKENS + len(question)


def test_epic_that_runs_every_token_again_is_full_prefill(pair):
    lm, oracle = pair
    prefix, passages, question = texts(lm, 7)
    logits, _, _ = read(lm, ("epic", {"first_tokens": TOKENS}), prefix, passages, question)
    assert kl(oracle.whole([*prefix, *chain(*passages), *question]), logits) <= MOST_KL


def test_epic_runs_first_and_last_tokens_in_their_context(pair):
    lm, oracle = pair
    first, last = 8, 4
    prefix, passages, question = texts(lm, 3)
    logits, _, computed = read(lm, ("epic", {"first_tokens": first, "last_tokens": last}), prefix, passages, question)
    assert computed == len(prefix) + PASSAGES * (first + last) + len(question)
    # the same, one passage after another, without any state or shift
    llama_cpp.llama_memory_clear(oracle.memory, True)
    at = len(prefix)
    oracle.run(prefix, 0)
    for ids in passages:
        llama_cpp.llama_memory_seq_rm(oracle.memory, 1, -1, -1)
        oracle.run(ids, at, 1)
        llama_cpp.llama_memory_seq_rm(oracle.memory, 1, at, at + first)
        llama_cpp.llama_memory_seq_rm(oracle.memory, 1, at + TOKENS - last, -1)
        oracle.run(ids[:first], at)
        llama_cpp.llama_memory_seq_cp(oracle.memory, 1, 0, -1, -1)
        oracle.run(ids[TOKENS - last :], at + TOKENS - last)
        at += TOKENS
    assert kl(oracle.run(question, at), logits) <= MOST_KL


@pytest.mark.parametrize("recipe", ["prefix", "primer"])
def test_a_passage_behind_text_is_kept_without_the_text(pair, recipe):
    lm, oracle = pair
    prefix, passages, question = texts(lm, 11)
    made = Recipe(recipe, primer=tuple(question[::-1] * 3) if recipe == "primer" else "")
    logits, _, _ = read(lm, ("reposition", {}), prefix, passages, question, made)
    # read behind the same text in place: the text begins so that the passage ends up where the prompt has it
    before = [*prefix, *made.primer_ids]
    llama_cpp.llama_memory_clear(oracle.memory, True)
    oracle.run(prefix, 0)
    at = len(prefix)
    for rank, ids in enumerate(passages, 1):
        start = max(0, at - len(before))
        oracle.run([*before, *ids], start, rank)
        llama_cpp.llama_memory_seq_rm(oracle.memory, rank, 0, start + len(before))
        llama_cpp.llama_memory_seq_add(oracle.memory, rank, 0, -1, at - start - len(before))
        llama_cpp.llama_memory_seq_cp(oracle.memory, rank, 0, -1, -1)
        at += len(ids)
    assert kl(oracle.run(question, at), logits) <= MOST_KL


def test_a_second_question_over_the_same_passages_places_nothing(pair):
    lm, _ = pair
    prefix, passages, question = texts(lm, 5)
    read(lm, ("reposition", {}), prefix, passages, question)
    _, known, computed = read(lm, ("reposition", {}), prefix, passages, question[::-1])
    assert known == len(prefix) + PASSAGES * TOKENS
    assert computed == len(question)


@pytest.mark.parametrize("method", ["full", "reposition"])
def test_an_evaluation_reads_along_an_answer_and_takes_it_back(pair, method):
    lm, oracle = pair
    prefix, passages, question = texts(lm, 6)
    fused, _ = PromptReader(lm, Prompt(prefix, passages, question), 16).read(get_method(method))
    answer = write_answer(lm, fused, 6).ids
    for ids in (answer, [*answer[::-1], 7]):  # a second answer sees nothing of the first
        logits = forced_logits(lm, fused, ids)
        for rank, found in enumerate(logits):
            asked = [*question, *ids[:rank]]
            whole = [*prefix, *chain(*passages), *asked]
            expected = oracle.whole(whole) if method == "full" else oracle.in_place(prefix, passages, asked)
            assert kl(expected, found) <= MOST_KL
    fused.cache.release()
    lm.sequences.forget()
    assert lm.sequences._num_free() == lm.sequences.num_cells, "the answer's cells are free again"


def test_states_with_keys_in_eight_bits_read_as_in_place(files):
    lm = load(files["wide"], f"llama.cpp:n_ctx={CELLS},threads=1,n_gpu_layers=0,parallel=2,kv=q8_0")
    oracle = Oracle(files["wide"], llama_cpp.GGML_TYPE_Q8_0)
    prefix, passages, question = texts(lm, 2)
    logits, _, _ = read(lm, ("reposition", {}), prefix, passages, question)
    assert kl(oracle.in_place(prefix, passages, question), logits) <= MOST_KL
    oracle.close()


def test_yarn_reads_whole_prompts_alone(files):
    lm = load(files["yarn"], f"llama.cpp:n_ctx={CELLS},threads=1,n_gpu_layers=0,parallel=2")
    assert [name for name in ("full", "reposition", "epic") if lm.reads(lm, get_method(name))] == ["full"]
    oracle = Oracle(files["yarn"])
    prefix, passages, question = texts(lm, 4)
    logits, _, _ = read(lm, ("full", {}), prefix, passages, question)
    assert kl(oracle.whole([*prefix, *chain(*passages), *question]), logits) <= MOST_KL
    oracle.close()


@pytest.mark.parametrize("name", REAL)
def test_real_models_read_states_as_passages_in_place(name):
    path = os.environ.get(REAL[name], "")
    if not Path(path).is_file():
        pytest.skip(f"{REAL[name]} names no GGUF file of {name}")
    lm, oracle = load(path, f"llama.cpp:n_ctx={CELLS},threads=1,n_gpu_layers=0,parallel=2"), Oracle(Path(path))
    ids = lm.tokenizer(Path(__file__).read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    for at in range(3):
        cuts = [ids[at * 200 + place : at * 200 + place + 60] for place in range(0, 240, 60)]
        parts = ids[:10], cuts, ids[-12:]
        logits, _, _ = read(lm, ("reposition", {}), *parts)
        expected = oracle.in_place(*parts)
        assert kl(expected, logits) <= MOST_KL
        assert logits.argmax() == expected.argmax()
    oracle.close()
