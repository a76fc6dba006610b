"""Options of `plan`, `simulate` and `census`: how fast the machine is, stated or measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ragcache.cli.flags import option
from ragcache.errors import ConfigError

if TYPE_CHECKING:
    from ragcache_plan.rates import MachineRates


@dataclass(frozen=True)
class RateOptions:
    """Options of the machine's speed. The defaults are those of an 8B model on an A100."""

    prefill_rate: Annotated[
        float | None, option("--prefill-rate", "Tokens that a prefill reads in a second.", show_default="5646")
    ] = None
    memory_rate: Annotated[
        float | None,
        option("--memory-rate", "Bytes of KV a second from host memory to their place.", show_default="24e9"),
    ] = None
    disk_rate: Annotated[float | None, option("--disk-rate", "Bytes of KV a second from disk.", show_default="3e9")] = (
        None
    )
    measure: Annotated[bool, option("--measure", "Measure on this machine what is not given; loads --model.")] = False
    device: Annotated[str, option("--device", "Where --measure runs the model: auto, cuda, xpu, mps or cpu.")] = "auto"

    def rates(self, model: str | None) -> MachineRates:
        """Return the machine's rates. Raises ConfigError naming the option."""
        from ragcache_plan.rates import MachineRates, measure_rates

        found = MachineRates()
        if self.measure:
            if model is None:
                raise ConfigError("--measure runs the model; say which with --model")
            from ragcache.models.load import load_lm

            found = measure_rates(load_lm(model, device=self.device), Path())
        return MachineRates(
            found.prefill_tokens_s if self.prefill_rate is None else self.prefill_rate,
            found.attention_share if self.prefill_rate is None else 0.0,
            found.memory_bytes_s if self.memory_rate is None else self.memory_rate,
            found.disk_bytes_s if self.disk_rate is None else self.disk_rate,
        )
