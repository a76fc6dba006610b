"""Stored blocks inside vLLM against plain transformers under an explicit mask."""

import pytest
import torch
from vllm_world import ANSWER, Answered, Engine, World, assert_alike

import ragcache as rc

pytest.importorskip("vllm", reason="runs in vLLM's own environment")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module", params=["step", "ahead", "small steps"])
def engine(request, world):
    if request.param == "small steps":  # pages of 32 tokens come one by one, and passages wait for theirs
        engine = Engine(world, block_size=32, max_num_batched_tokens=16, max_num_seqs=4)
    else:
        engine = Engine(world, request.param)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def full(world) -> Answered:
    return world.oracle(world.case(), full=True)


def test_passages_come_from_blocks_and_see_themselves_alone(world, engine, full):
    expected = world.oracle(world.case())
    assert expected.ids != full.ids  # else it would show nothing
    (first,) = engine.ask((world.case(), True))
    assert_alike(first, expected)
    assert first.told == {"loaded_tokens": len(world.case().ids) - len(world.suffix), "reason": None}
    (again,) = engine.ask((world.case(), True))
    assert_alike(again, expected)
    assert again.told["loaded_tokens"] < first.told["loaded_tokens"]  # the rest was in vLLM's cache


def test_a_plain_request_never_meets_their_kv(world, engine, full):
    engine.ask((world.case(), True))
    assert_alike(engine.ask((world.case(), False))[0], full)


def test_link_tokens_run_between_the_passages(world, engine):
    order = (2, 0, 3, 1)
    cases = [world.case(order, links=True), world.case(order, links=True, suffix=world.suffix[::-1])]
    for answered, case in zip(engine.ask(*((case, True) for case in cases)), cases, strict=True):
        assert_alike(answered, world.oracle(case))
    assert_alike(engine.ask((cases[0], False))[0], world.oracle(cases[0], full=True))


def test_epic_runs_the_first_tokens_of_passages_again(world, engine):
    lm = world.lm
    prompt = rc.Prompt(prefix_ids=world.prefix, chunk_ids=world.chunks, suffix_ids=world.suffix)
    fused = rc.fuse(lm, prompt, method="epic", first_tokens=4)
    ids, logprobs, logits = [], [], fused.next_logits
    for position in range(fused.next_position, fused.next_position + ANSWER):
        scores = torch.log_softmax(logits.float(), -1)
        ids.append(int(scores.argmax()))
        logprobs.append(float(scores.max()))
        logits = lm.run(ids[-1:], position, fused.cache)
    assert_alike(engine.ask((world.case(first=4), True))[0], Answered(ids, logprobs))


def test_requests_of_every_kind_share_a_step(world, engine, full):
    cases = [world.case((3, 1, 0, 2)), world.case((1, 2), links=True), world.case((1, 0, 2), first=0)]
    answers = engine.ask(*((case, True) for case in cases), (world.case(), False))
    for answered, case in zip(answers, cases, strict=False):
        assert_alike(answered, world.oracle(case))
    assert_alike(answers[-1], full)


@pytest.mark.parametrize("links", [False, True])
def test_a_block_that_is_missing_or_damaged_costs_time_alone(world, engine, links):
    case = world.case((3, 2), links=links)
    exact, file = world.oracle(case, full=True), world.block_file(2)
    whole = file.read_bytes()
    try:
        file.unlink()
        (missing,) = engine.ask((case, True))
        damaged = bytearray(whole)
        damaged[-100] ^= 1
        file.write_bytes(bytes(damaged))
        (refused,) = engine.ask((case, True))
    finally:
        file.write_bytes(whole)
    for answered, reason in ((missing, "not stored"), (refused, "damaged")):
        assert_alike(answered, exact)
        assert answered.told["loaded_tokens"] == 0
        assert reason in answered.told["reason"]
    assert_alike(engine.ask((case, True))[0], world.oracle(case))


def test_a_hundred_plain_requests_stay_exact(world, engine):
    import random

    numbers = random.Random(7)
    cases = [world.case(numbers.sample(range(4), 3), links=numbers.random() < 0.5) for _ in range(20)]
    engine.ask(*((case, True) for case in cases), count=2)
    exact = {tuple(case.ids): world.oracle(case, 2, full=True) for case in cases}
    for _ in range(5):
        for answered, case in zip(engine.ask(*((case, False) for case in cases), count=2), cases, strict=True):
            assert_alike(answered, exact[tuple(case.ids)])
