"""The device that these tests run on: CUDA, or the one in RAGCACHE_TEST_DEVICE, to try the tests themselves."""

import os

import pytest
import torch
from families import oracle_model, save_tiny

import ragcache as rc

DEVICE = os.environ.get("RAGCACHE_TEST_DEVICE", "cuda")


@pytest.fixture(scope="session", autouse=True)
def exact_products():
    """TF32 keeps ten bits of a product's factors: no oracle in float32 would be met."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(scope="session")
def device():
    return torch.device(DEVICE)


@pytest.fixture(scope="session")
def models(tmp_path_factory, device):
    """A family's model on the device, the same on the CPU, and plain transformers' on the CPU; loaded once."""
    made = {}

    def get(family, dtype="float32"):
        if (family, dtype) not in made:
            saved = save_tiny(family, str(tmp_path_factory.mktemp(family)))
            there = rc.load_lm(saved, dtype=dtype, device=str(device))
            made[family, dtype] = there, rc.load_lm(saved, dtype=dtype), oracle_model(saved)
        return made[family, dtype]

    return get
