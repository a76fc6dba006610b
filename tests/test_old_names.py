"""Public names of before: they are the new ones, and say so once a use."""

from typing import Any

import pytest
import torch

import ragcache as rc

RENAMED = {
    "Additions": "AddedTokens",
    "Context": "RecomputeContext",
    "Fused": "FuseOutput",
    "Job": "PrefillRequest",
    "Library": "Store",
    "Prefilled": "PrefillOutput",
    "ReadOptions": "GenerationOptions",
}


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_name_is_the_new_one(old, new):
    with pytest.warns(DeprecationWarning, match=rf"rc\.{old} is rc\.{new} now") as caught:
        assert getattr(rc, old) is getattr(rc, new)
    assert caught[0].filename == __file__
    assert old not in rc.__all__
    assert old not in dir(rc)
    assert new in rc.__all__


class Sharpened(rc.FusionMethod):
    """A method that was written before: it calls what it gets a job, and reads it."""

    name = "sharpened"
    reuses_blocks = True

    def prefill(self, job: Any) -> Any:
        return job.read(adjust=lambda scores, _positions: scores / 0.9)


class Now(Sharpened):
    """The same as it is written now."""

    name = "now"

    def prefill(self, job: Any) -> Any:
        cache = job.new_cache()
        cache.adjust = lambda scores, _positions: scores / 0.9
        return job.run(cache)


def test_a_method_that_reads_a_job_goes_on():
    lm = rc.load_lm("mini")
    prompt = rc.Prompt([5, 6], [[7, 8, 9], [10, 11]], [12, 13])
    with pytest.warns(DeprecationWarning, match=r"read\(\) is run\(new_cache\(\)\) now"):
        sharpened = rc.fuse(lm, prompt, method=Sharpened())
    assert not torch.allclose(sharpened.next_logits, rc.fuse(lm, prompt, method="reposition").next_logits)
    assert torch.equal(sharpened.next_logits, rc.fuse(lm, prompt, method=Now()).next_logits)
