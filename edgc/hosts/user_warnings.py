"""What the user is warned of: one line on the standard error stream, once for all processes of a group."""

import torch

from edgc.byte_counts import ByteCount
from edgc.comm.objects import ProcessGroup, process
from edgc.compress.fused import triton_kernels
from edgc.config import EDGCConfig, RankPolicy, flag
from edgc.observe.window import WindowReport
from edgc.plan.by_entropy.entropy_ranks import STABLE, WARM_UP
from edgc.plan.controller import Controller
from edgc.printing import print_warning

LEAST_SHARE_OF_VOLUME = 0.97  # which a whole run may reach without a word


def warn(message: str, group: ProcessGroup | None = None) -> None:
    """Print one warning line, once for all processes of the group."""
    if process(group) == 0:
        print_warning(message)


def warn_of_new_plans(what: str, config: EDGCConfig, group: ProcessGroup | None = None) -> None:
    """``what`` has saved a controller that cannot go on, because only one of both runs has a volume."""
    written = "without" if config.rank_policy is RankPolicy.VOLUME else "with"
    warn(f"{what} was written {written} {flag('volume')}: error feedback goes on, plans start anew", group)


def warn_of_budget(controller: Controller, group: ProcessGroup | None = None) -> None:
    """Warn before a run that cannot send as little as its volume."""
    budget = controller.budget
    if budget is not None and budget.reachable < budget.volume:
        message = (
            f"{flag('volume')} {budget.volume:g}: this run can send about {budget.reachable:.3g}x fewer bytes at most, "
            "with its warm-up and the smallest rank or format of each parameter"
        )
        warn(message, group)


def warn_of_spent_budget(controller: Controller, group: ProcessGroup | None = None) -> None:
    """Warn in a resumed run if the windows before have left too little of its volume."""
    budget = controller.budget
    if budget is not None and not budget.rounds and budget.ledger.exhausted():
        message = (
            f"{flag('volume')} {budget.volume:g}: the steps before this resume have sent so much that the remaining "
            "ones would have to send less than the smallest rank or format of each parameter. They send as little as "
            f"they can, and lose much of the gradient. Give a smaller {flag('volume')}"
        )
        warn(message, group)


def warn_of_missed_volume(volume: float, gradients: ByteCount, group: ProcessGroup | None = None) -> None:
    """Warn after a whole run that has sent more than its volume allows. ``gradients``: what the volume is of."""
    if gradients.sent and (reached := gradients.fp32 / gradients.sent) < LEAST_SHARE_OF_VOLUME * volume:
        message = (
            f"{flag('volume')} {volume:g} was asked for, and the run sent {reached:.1f}x fewer bytes. Possible causes: "
            "the run has few windows or few measured iterations, too little of the gradient arrived or the training "
            "loss rose for a while, or "
            "padding and samples are a large part of what so small a model sends"
        )
        warn(message, group)


def warn_of_warmup(report: WindowReport, config: EDGCConfig, group: ProcessGroup | None = None) -> None:
    """Warn after a whole run of the stages whose entropy was not stable in time."""
    seen = zip(report.stages, report.ranks, report.plan.reasons, strict=True)
    dense = [str(stage.stage) for stage, rank, why in seen if rank is None and why in (WARM_UP, STABLE)]
    if dense:
        limit, window = config.study.entropy_stability, config.ranks.window
        message = (
            f"{', '.join(dense)} stayed dense to the end. Compression begins once the entropy changes by less than "
            f"{limit:g} nats from one window of {window} iterations to the next"
        )
        warn(message, group)


def warn_of_kernels(config: EDGCConfig, device: torch.device, group: ProcessGroup | None = None) -> None:
    """Warn where fused kernels are asked for that do not run on this device."""
    if config.study.kernels == "fused" and triton_kernels(device) is None:
        message = "Triton's kernels need Triton and a GPU from Ampere on; EDGC uses plain torch instead"
        warn(f"{flag('kernels')} = fused: {message}", group)
