"""Make an adapter small enough to ship: LoRA's matrices of a lower rank, in float8.

    python -m tools.shrink_adapter ADAPTER OUT --rank 12

Each product of two matrices is replaced by the nearest product of that rank (its truncated singular value
decomposition), with the square root of each singular value in both factors. The factors are scaled to float8's range by
a power of two, which `lora_alpha` undoes. Products that are 0 are left out: training on passages alone trains nothing
after the last layer's keys and values.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ragcache.models.lora import DOWN, LORA_FILE, UP, Lora, take_pairs

FLOAT8 = torch.float8_e4m3fn
HIGHEST = 1 << 4
"""Largest number after scaling: float8 keeps all its bits for 13 powers of two below it."""


def shrink(adapter: Path, out: Path, rank: int) -> float:
    """Write the smaller adapter. Returns the least share of a product's squared norm that was kept."""
    shutil.copytree(adapter, out, ignore=lambda where, names: {"checkpoints", *(n for n in names if "jsonl" in n)})
    stated = json.loads((adapter / Lora.FILE).read_text(encoding="utf-8"))
    held = load_file(adapter / LORA_FILE)
    cut = {name: _cut(down.double(), up.double(), rank) for name, (down, up) in take_pairs(held).items() if up.any()}
    most = max(matrix.abs().max().item() for down, up, _ in cut.values() for matrix in (down, up))
    factor = 2.0 ** math.floor(math.log2(HIGHEST / most))
    for name, (down, up, _) in cut.items():
        held[f"{name}{DOWN}"], held[f"{name}{UP}"] = ((matrix * factor).to(FLOAT8) for matrix in (down, up))
    save_file(held, out / LORA_FILE, {"format": "pt"})
    stated |= {"r": rank, "lora_alpha": rank * stated["lora_alpha"] / stated["r"] / factor**2}
    (out / Lora.FILE).write_text(json.dumps(stated, indent=2) + "\n", encoding="utf-8")
    return min(left for _, _, left in cut.values())


def _cut(down: Tensor, up: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    (before, inner), (after, outer) = torch.linalg.qr(up), torch.linalg.qr(down.T)
    left, sizes, right = torch.linalg.svd(inner @ outer.T)  # of small matrices: [rank, rank]
    left, right = before @ left, right @ after.T
    roots = sizes[:rank].sqrt()
    kept = sizes[:rank].square().sum() / sizes.square().sum()
    return (roots[:, None] * right[:rank]).contiguous(), (left[:, :rank] * roots).contiguous(), kept.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rank", type=int, default=12)
    options = parser.parse_args()
    left = shrink(options.adapter, options.out, options.rank)
    print(f"{options.out}: rank {options.rank}, at least {left:.3f} of each product's squared length")


if __name__ == "__main__":
    main()
