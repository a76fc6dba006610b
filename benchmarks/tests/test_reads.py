"""How often the host reads a tensor's value while a method reads a prompt: on a GPU, each read waits for the device."""

from unittest import mock

import pytest
import torch
from host_reads import HostReads, reads_of

from benchmarks import methods
from benchmarks.shapes import build
from ragcache.models import attention

READS = {"samkv": 66}
"""`samkv` keeps other tokens in each layer, of two layers. All other methods read nothing."""

READING = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "bool": lambda x: bool(x[0] > 0),
    "index": lambda x: [0, 1][x[0].long()],
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "by a mask": lambda x: x[x > 0],
    "put by a mask": lambda x: x.clone().__setitem__(x > 0, x[x > 0]),
    "equal": lambda x: torch.equal(x, x),
    "unique": lambda x: x.unique(),
    "repeats": lambda x: x.repeat_interleave(x.long()),
    "to the host": lambda x: x.to("cpu"),
}
OTHER = {
    "by numbers": lambda x: x[torch.arange(1)],
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "repeat": lambda x: x.repeat_interleave(2),
    "sort": lambda x: x.sort(descending=True).indices[:1],
}


@pytest.mark.parametrize("way", [*READING.values(), *OTHER.values()], ids=[*READING, *OTHER])
def test_every_way_to_read_counts_and_nothing_else(way):
    given = torch.tensor([1.0, 2.0])
    with HostReads() as reads:
        way(given)
    assert bool(reads.calls) is (way in READING.values())


@pytest.fixture(scope="module")
def bench():
    return methods.Bench(build("toy", "float32"), methods.Settings("toy", passages=5, tokens=150, suffix=8))


@pytest.mark.parametrize("row", methods.chosen_methods([[1]] * 5))
def test_no_method_gains_a_read(bench, row):
    def read():
        bench.fuse(bench.methods[row]).cache.release()

    read()
    reads = reads_of(read)
    assert sum(reads.values()) == READS.get(row.split(",")[0], 0), reads


@pytest.mark.parametrize("row", methods.chosen_methods([[1]] * 5))
def test_answers_are_the_same_where_the_host_does_not_look(bench, row):
    looking = bench.fuse(bench.methods[row]).next_logits
    with mock.patch.object(attention, "reads_freely", return_value=False):
        blind = bench.fuse(bench.methods[row]).next_logits
    torch.testing.assert_close(blind, looking, atol=2e-5, rtol=2e-5)
