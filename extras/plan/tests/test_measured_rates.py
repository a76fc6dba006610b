"""The measured prefill rate does not depend on the load of the machine."""

from types import SimpleNamespace

import pytest

from ragcache_plan import rates as rates_module
from ragcache_plan.rates import measure_prefill


class SlowedModel:
    """A model whose passes take 1 ms a token by the test's clock; only every fourth pass has a quiet machine."""

    max_positions = 4096

    def __init__(self) -> None:
        self.now, self.passes = 0.0, 0

    def new_cache(self, _capacity):
        return SimpleNamespace(release=lambda: None)

    def run(self, ids, _position, _cache):
        self.passes += 1
        self.now += 0.001 * len(ids) + (0 if self.passes % 4 == 3 else 5.0)


def test_a_measurement_takes_the_fastest_pass(monkeypatch):
    lm = SlowedModel()
    monkeypatch.setattr(rates_module, "time", SimpleNamespace(perf_counter=lambda: lm.now))
    rate = measure_prefill(lm)
    assert (rate.linear, rate.quadratic) == (pytest.approx(0.001), pytest.approx(0.0, abs=1e-9))
