"""Pretraining whose probe has found these seconds of a reduction: rounded, and in low rank.

    python tests/distributed/probed_run.py --probed ROUNDED LOW_RANK MEGATRON'S FLAGS

Megatron's own takes 1 s, and is not tried in training: between processes of one machine it would be faster.
"""

import sys

from edgc.plan.times import trials
from edgc.plan.times.comm_cost import LinearCost, StageCost
from megatron.edgc.recipes import cpu

cpu.redirect()

from megatron.edgc import session  # noqa: E402
from megatron.edgc.recipes.pretrain import pretrain_gpt  # noqa: E402

place = sys.argv.index("--probed")
rounded, low_rank = map(float, sys.argv[place + 1 : place + 3])
del sys.argv[place : place + 3]
cost = StageCost(LinearCost(low_rank, 1e-9), 1.0, 1.0, rounded_seconds=rounded, volume_rank=8)
trials.LARGEST_SHARE_OF_RUN = 0.0
session.reduction_cost = lambda *_: cost  # type: ignore[assignment]

if __name__ == "__main__":
    pretrain_gpt(True)
