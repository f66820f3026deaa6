"""Rivals against plain references: the whole algorithm over two processes, written out on one.

The references share no code with the engines, and round to the formats of ``docs/algorithm.md`` by themselves.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from edgc.comm.collectives import Communicator, Traffic, run_to_end
from edgc.compress.reducer import GradientReducer
from edgc.config import EDGCConfig
from edgc.plan.selection import Selection
from edgc.specs import MatrixSpec
from tests.distributed.gloo import run_on_ranks

MATRIX = MatrixSpec("w", 32, 64)
GROUP = 128
STEPS = 12
SHARE = 0.05


def gradient(process: int, step: int) -> Tensor:
    """In rows of different scales, with a part that is the same on all processes and in all steps."""
    own, common = (torch.Generator().manual_seed(seed) for seed in (100 * step + process, 7))
    noisy = torch.randn(32, 64, generator=common) + torch.randn(32, 64, generator=own)
    return noisy * torch.logspace(-1, 1, 32).unsqueeze(1)


def to_bf16(values: Tensor) -> Tensor:
    return values.bfloat16().float()


def sign_and_size(values: Tensor) -> Tensor:
    """Each value as plus or minus one size for 128 values: 1-bit SGD with the size that is best for normal values."""
    groups = values.reshape(-1, GROUP)
    size = to_bf16(groups.square().mean(dim=1, keepdim=True).sqrt() * 1.5958) / 2
    return torch.where(groups > 0, size, -size).view_as(values)


def in_whole_steps(values: Tensor, bits: int) -> Tensor:
    """Each value as a whole number of steps, the largest of 128 values as the largest number."""
    groups, largest = values.reshape(-1, GROUP), 2 ** (bits - 1) - 1
    step = to_bf16(groups.abs().amax(dim=1, keepdim=True) * 1.004 / largest)
    codes = (groups / step + largest).round().clamp(0, 2**bits - 1)  # halves, often met in a sum, go to even codes
    return ((codes - largest) * step).view_as(values)


def rounded_sums(rounded: Callable[[Tensor], Tensor], kept: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    """Seide et al. 2014: each process rounds gradient and error, and the owner of a half of the sum rounds that half.

    ``kept``: the new error, from what rounding left and the old error.
    """
    errors, sums = [torch.zeros(32, 64), torch.zeros(32, 64)], []
    for step in range(STEPS):
        owed = [gradient(process, step) + error for process, error in enumerate(errors)]
        sent = [rounded(one) for one in owed]
        total = sent[0] + sent[1]
        result = rounded(total)
        left = [one - what for one, what in zip(owed, sent, strict=True)]
        left[0][:16] += (total - result)[:16]
        left[1][16:] += (total - result)[16:]
        errors = [kept(new, old) for new, old in zip(left, errors, strict=True)]
        sums.append(result)
    return sums


def loco() -> list[Tensor]:
    """LoCo (arXiv 2407.04480): the error is a moving average with weight 0.8 of the past, in 8 bits."""
    return rounded_sums(
        lambda values: in_whole_steps(values, 4), lambda new, old: in_whole_steps(0.2 * new + 0.8 * old, 8)
    )


def onebit() -> list[Tensor]:
    return rounded_sums(sign_and_size, lambda new, old: new)


def topk() -> list[Tensor]:
    """Each process sends the largest 5 % of gradient and error, the rest stays (arXiv 1712.01887 with no extras)."""
    errors, sums = [torch.zeros(32, 64), torch.zeros(32, 64)], []
    for step in range(STEPS):
        owed = [gradient(process, step) + error for process, error in enumerate(errors)]
        sent = []
        for one in owed:
            smallest = one.abs().flatten().sort(descending=True).values[round(SHARE * one.numel()) - 1]
            sent.append(torch.where(one.abs() >= smallest, one, 0.0))
        errors = [one - what for one, what in zip(owed, sent, strict=True)]
        sums.append(sent[0] + sent[1])
    return sums


REFERENCES = {"loco": loco, "onebit": onebit, f"topk:{SHARE}": topk}


def largest_difference(rank: int) -> dict[str, float]:
    """Of the sums of all steps, over the largest value."""
    found = {}
    assert dist.group.WORLD is not None
    for engine, reference in REFERENCES.items():
        communicator = Communicator(dist.group.WORLD, Traffic())
        reducer = GradientReducer(Selection((MATRIX,)), EDGCConfig.of(engine=engine), communicator, torch.device("cpu"))
        reducer.set_rank(1)
        differences = []
        for step, expected in enumerate(reference()):
            local = {"w": gradient(rank, step)}
            run_to_end(reducer.reduce(local, step))
            differences.append((local["w"] - expected).abs().max() / expected.abs().max())
        found[engine] = float(torch.stack(differences).max())
    return found


def test_rivals_are_as_published() -> None:
    for found in run_on_ranks(largest_difference, 2):
        assert {engine: one for engine, one in found.items() if not one < 1e-5} == {}
