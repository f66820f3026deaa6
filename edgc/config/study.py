"""Settings that only studies vary."""

import math
import re
from dataclasses import dataclass

from edgc.config.setting import PAPER, Settings, setting

ESTIMATORS = ("gaussian", "histogram", "spacing")


@dataclass(frozen=True, kw_only=True)
class Study(Settings):
    """Settings that only studies vary: on the command line ``--edgc-study NAME=VALUE ...``. A few presets set one.

    A value that breaks a rule raises ``ConfigError``.
    """

    entropy_estimator: str = setting("gaussian", "how entropy is estimated", "name", f"{PAPER}, GDS", ESTIMATORS)
    # The changes from window to window that recorded runs show are in docs/algorithm.md, 3.
    entropy_stability: float = setting(
        0.25,
        "a stage's warm-up ends once its entropy changes by less than this from one window to the next",
        "nats",
        "EDGC's own: the paper gives no figure; docs/algorithm.md, 3",
    )
    stage_share: float = setting(
        1.0,
        "share of the pipeline stages, rounded up, whose gradients are compressed; it takes the first stages, whose "
        "backward passes end last",
        "fraction",
        "Optimus-CC, ASPLOS 2023",
    )
    rank_tilt: float = setting(
        0.0,
        "how far above its mean a constant rank starts, as a fraction; it falls linearly to as far below",
        "fraction",
        "EDGC's own",
    )
    min_saving: float = setting(
        2.0,
        "a matrix is compressed only if its factors have at least this many times fewer elements",
        "ratio",
        "PyTorch's PowerSGD hook, min_compression_rate",
    )
    only: str = setting(
        "",
        "the engine takes only parameters in whose names this regular expression is found; the others travel in "
        "rest_wire, or, beside an engine without ranks, in fp32",
        "regular expression",
        "EDGC's own",
    )
    error_gain: float = setting(
        1.0,
        "share of the error feedback that a step adds to a gradient; the rest waits for later steps",
        "fraction",
        "as in EControl: arXiv 2311.05645",
    )
    whole_error_fraction: float = setting(
        0.0,
        "share of the run, from its start, in which every step adds the whole error feedback, whatever the error_gain",
        "fraction of iterations",
        "docs/algorithm.md, 5",
    )
    transpose: bool = setting(
        True,
        "powersgd transposes wide matrices, so that its first factor lies on the longer side",
        "switch",
        "EDGC's own",
    )
    warm_start: bool = setting(
        True, "powersgd starts from the factor of the step before instead of a random one", "switch", "arXiv 1905.13727"
    )
    spike_limit: float = setting(
        5.0,
        "a gradient above this many times its running norm is a spike: its error is scaled down (inf: none is one)",
        "ratio",
        "docs/algorithm.md, 5",
    )
    fidelity_share: float | None = setting(
        None,
        "how much is sent to measure, for each parameter, how far and how late the optimizer gets its gradient, as a "
        "share of the bytes of a dense fp32 all-reduce in all iterations; inf measures every entry (default: 0.0005 "
        "with --edgc-volume, but at most 1 % of the entries in a measured iteration, else 0, nothing)",
        "fraction",
        "docs/algorithm.md, 9",
    )
    least_fidelity: float = setting(
        0.1,
        "with --edgc-volume, the share of the energy of what the optimizer gets that must lie along the true gradient; "
        "after a window below it, steps get twice the bytes until it is three times as much; 0: they never do",
        "fraction",
        "docs/algorithm.md, 10",
    )
    greatest_loss_rise: float = setting(
        0.1,
        "share by which the mean training loss of a window may lie above the lowest of the ten windows before; if it "
        "does, the run warns, steps of a volume get twice the bytes, and ranks by entropy become rmax, until the loss "
        "has fallen; inf: nothing watches it",
        "fraction",
        "docs/algorithm.md, 10",
    )
    learning_rate_power: float = setting(
        0.0,
        "with --edgc-volume the budget of a step goes with this power of its learning rate, which Megatron's arguments "
        "set (while the rate rises, of the largest one ahead); 0 gives every step the same",
        "exponent",
        "docs/algorithm.md, 10",
    )
    kernels: str = setting(
        "plain",
        "what low rank computes with: plain torch, or Triton's kernels and Cholesky factorisations (fused), which need "
        "fewer passes over a gradient; on an H100 plain torch took less time with large matrices",
        "name",
        "docs/gpu.md",
        ("plain", "fused"),
    )
    statistics: bool = setting(
        False,
        "log moments and entropies of the gradients of each kind of layer in every window (slow: for study)",
        "switch",
        "EDGC's own",
    )

    @classmethod
    def flag(cls, name: str) -> str:
        """The command-line flag of one of these settings."""
        return f"--edgc-study {name}"

    def takes(self, name: str) -> bool:
        """Whether ``only`` leaves a parameter of this name to the engine."""
        return re.search(self.only, name) is not None

    def __post_init__(self) -> None:
        self.require_kinds()
        try:
            re.compile(self.only)
        except re.error as error:
            self.require("only", False, f"must be a regular expression: {error}")
        self.require("stage_share", 0 < self.stage_share <= 1, "must lie in (0, 1]")
        self.require("entropy_stability", self.entropy_stability > 0, "must be positive")
        self.require("error_gain", 0 < self.error_gain <= 1, "must lie in (0, 1]")
        self.require("whole_error_fraction", 0 <= self.whole_error_fraction <= 1, "must lie in [0, 1]")
        self.require("rank_tilt", -1 < self.rank_tilt < 1, "must lie between -1 and 1")
        self.require("spike_limit", self.spike_limit > 1, "must be above 1")
        self.require("min_saving", self.min_saving >= 1, "must be at least 1")
        # there is relief until it is three times as much
        self.require("least_fidelity", 0 <= self.least_fidelity < 1 / 3, "must lie in [0, 1/3)")
        self.require("greatest_loss_rise", self.greatest_loss_rise > 0, "must be positive")
        self.require("learning_rate_power", 0 <= self.learning_rate_power < math.inf, "must not be negative")
        if self.fidelity_share is not None:
            self.require("fidelity_share", self.fidelity_share >= 0, "must not be negative")
