"""Other models, ranks, compiled passes and preempted requests: stored blocks inside vLLM against plain transformers."""

import pytest
from vllm_world import Engine, World, assert_alike

pytest.importorskip("vllm", reason="runs in vLLM's own environment")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
KINDS = {
    "qwen3": ("qwen3", {}, {}),
    "a sliding window": ("mistral", {"sliding_window": 64}, {}),
    "two ranks": ("llama", {}, {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}),
    "compiled": ("llama", {}, {"enforce_eager": False}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_answers_equal_the_oracles(tmp_path, kind, monkeypatch):
    family, config, options = KINDS[kind]
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1" if "tensor_parallel_size" in options else "0,1")
    world = World(tmp_path, family, **config)
    engine = Engine(world, **options)
    try:
        cases = [world.case((2, 0, 3, 1)), world.case((3, 1), links=True)]
        answers = engine.ask(*((case, True) for case in cases))
        for answered, case in zip(answers, cases, strict=True):
            assert_alike(answered, world.oracle(case))
            assert answered.told["reason"] is None
        for case in cases:
            assert_alike(engine.ask((case, False))[0], world.oracle(case, full=True))
    finally:
        engine.close()


@pytest.mark.parametrize(("links", "pages"), [(False, 20), (True, 25)])
def test_a_preempted_request_goes_on_as_it_began(tmp_path, links, pages):
    world, count = World(tmp_path, "llama"), 120
    # Pages for two prompts, and for one answer and a half: one of two requests has to give way to the other.
    engine = Engine(world, num_gpu_blocks_override=pages, max_model_len=544, block_size=32)
    try:
        cases = [world.case(links=links), world.case((3, 0, 1, 2), links=links, suffix=world.suffix[::-1])]
        answers = engine.ask(*((case, True) for case in cases), count=count)
        for answered, case in zip(answers, cases, strict=True):
            assert answered.ids == world.oracle(case, count).ids
        stored = sum(block.num_tokens for block in cases[0].layout.blocks)
        assert max(answered.told["loaded_tokens"] for answered in answers) > stored  # it was loaded once more
    finally:
        engine.close()
