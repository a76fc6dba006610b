"""Properties that make training fast on a GPU, tested on a CPU: steps read nothing back, layers are compiled once, and
weights beside an adapter have 16 bits.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from host_reads import HostReads
from run_options import PASSAGES, run_options
from torch._dynamo.utils import counters
from transformers import TrainerCallback
from transformers.modeling_layers import GradientCheckpointingLayer

from ragcache_train import trainer as trainer_module
from ragcache_train.trainer import ReuseTrainer, compile_layers, train

LINES = [
    {"type": "qa", "passages": PASSAGES[: 1 + n % 3], "question": f"Where is Ann{'?' * n}", "answer": "Oslo"}
    for n in range(12)
]
WAYS = {"all weights": {}, "lora": {"lora_rank": 2}, "distill": {"objective": "distill"}}
BFLOAT16 = {"precision": "bfloat16"}


# Dynamo looks at gradients that are not there.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture
def options(base, tmp_path):
    options = run_options(base, tmp_path, LINES)
    return replace(options, batch_tokens=640, log_every=100, save_every=100, steps=8)


@pytest.fixture
def of_one_length(monkeypatch):
    """Pad all batches to the same length, as on a GPU."""

    class OneLength(ReuseTrainer):
        def __init__(self, *args, multiple, **kwargs):
            super().__init__(*args, multiple=640, **kwargs)

    monkeypatch.setattr(trainer_module, "ReuseTrainer", OneLength)


class ReadsAtSteps(TrainerCallback):
    """A callback that records the number of reads at the end of each step."""

    def __init__(self, calls: Counter[str]) -> None:
        self.calls, self.at = calls, []

    def on_step_end(self, args, state, control, **kwargs):
        self.at.append(Counter(self.calls))


@pytest.mark.parametrize("way", [pytest.param("all weights", marks=pytest.mark.slow), "lora", "distill"])
def test_a_step_reads_nothing_back(options, monkeypatch, way):
    marks = ReadsAtSteps(Counter())

    class Marked(ReuseTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.add_callback(marks)

    for name in ("collate", "collate_pairs"):  # on the host, whatever the device is
        monkeypatch.setattr(trainer_module, name, uncounted(getattr(trainer_module, name), marks.calls))
    monkeypatch.setattr(trainer_module, "ReuseTrainer", Marked)
    with HostReads(marks.calls, uploads=True):
        report = train(replace(options, minutes=60.0, **WAYS[way]))
    assert report.steps == options.steps, "steps end a run before its time"
    assert marks.calls["_local_scalar_dense"]  # the last line of the log is read: counting works
    assert marks.at[6] - marks.at[1] == Counter()


def uncounted(collate, calls):
    def collate_uncounted(*args, **kwargs):
        before = Counter(calls)
        found = collate(*args, **kwargs)
        calls.clear()
        calls.update(before)
        return found

    return collate_uncounted


def losses(report_of, options):
    lines = []
    report_of(replace(options, log_every=1), show=lines.append)
    return [(line["loss"], line["grad_norm"]) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{**WAYS["lora"], **BFLOAT16}, {**WAYS["distill"], "hidden_weight": 0.0}],
    ids=["lora, bfloat16", "distill"],
)
def test_compiled_layers_compute_the_same_and_are_compiled_once(options, of_one_length, monkeypatch, caplog, changes):
    options = replace(options, **changes)
    plain = losses(train, options)
    torch._dynamo.reset()
    counters.clear()

    def without_inductor(*given):
        assert compile_layers(*given, backend="aot_eager")
        counters["after"] = Counter(counters["frames"])

    monkeypatch.setattr(trainer_module, "compile_layers", without_inductor)
    compiled = losses(train, replace(options, out=options.out.with_name("compiled"), compile=True))
    torch.testing.assert_close(torch.tensor(compiled), torch.tensor(plain), atol=1e-3, rtol=1e-3)
    frames = counters["frames"]["total"]
    assert frames == counters["after"]["total"]  # batches of other rows were not compiled again
    assert 0 < frames <= 4  # of both layers together
    assert "cannot be compiled" not in caplog.text


class Scale(GradientCheckpointingLayer):
    """A layer that compilers can be tried on without a model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, states):
        return states * self.weight


@pytest.mark.parametrize(("factor", "said"), [(1, ""), (2, "loss 3 and"), (0, "no compiler here")])
def test_a_compiler_that_changes_the_results_is_not_used(factor, said, caplog):
    layer = Scale()

    def loss():
        return layer(torch.ones(3)).sum()

    def backend(graph, inputs):
        if not factor:
            raise RuntimeError("no compiler here")
        return lambda *args: [factor * one for one in graph(*args)]

    torch._dynamo.reset()
    assert compile_layers(layer, [layer.weight], loss, backend) is (not said)
    assert ("layers cannot be compiled" in caplog.text) == bool(said)
    assert said in caplog.text
    assert layer.weight.grad is None, "the gradients of the check are dropped"
    assert loss().item() == 3


@pytest.mark.slow
@pytest.mark.parametrize("precision", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_weights_beside_an_adapter_are_as_precise_as_the_passes(options, monkeypatch, precision):
    seen = []

    class Looked(ReuseTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            seen.append({name: one.dtype for name, one in model.named_parameters()})
            return super().compute_loss(model, inputs, *args, **kwargs)

    monkeypatch.setattr(trainer_module, "ReuseTrainer", Looked)
    form = {"steps": 1, "lora_rank": 2, "precision": precision}
    train(replace(options, **form))
    trained = {name for name in seen[0] if "lora_" in name or "trainable_tokens_delta" in name}
    assert any("trainable_tokens_delta" in name for name in trained)
    assert {seen[0][name] for name in trained} == {torch.float32}
    assert {seen[0][name] for name in seen[0].keys() - trained} == {getattr(torch, precision)}
    train(replace(options, **form, merge=True, out=options.out.with_name("merged")))
    assert {dtype for name, dtype in seen[1].items() if "original" not in name} == {torch.float32}


@pytest.mark.slow
def test_bfloat16_beside_an_adapter_learns_what_float32_does(options):
    runs = [{}, BFLOAT16]
    found = [
        losses(train, replace(options, lora_rank=4, learning_rate=2e-2, steps=30, out=options.out / str(n), **run))
        for n, run in enumerate(runs)
    ]
    whole, half = (torch.tensor([loss for loss, _ in one]) for one in found)
    assert whole[-5:].mean() < 0.7 * whole[:5].mean()
    torch.testing.assert_close(half, whole, atol=0.15, rtol=0.05)
