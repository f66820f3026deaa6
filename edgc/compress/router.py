"""Who takes which gradient: the engine at a rank, or rounding in a wire format."""

from collections.abc import Mapping

import torch
from torch import Tensor

from edgc.compress.engines.base import Elementwise, Engine, LowRank
from edgc.compress.engines.rounding import Rounding
from edgc.compress.engines.rows import Rows
from edgc.compress.fused import FusedRoute, triton_kernels
from edgc.compress.routes.base import ReductionContext, Route
from edgc.compress.routes.elementwise import ElementwiseRoute, portion_of
from edgc.compress.routes.low_rank import FactorRoute
from edgc.config import FORMATS, EDGCConfig
from edgc.engines import engine_arguments, engine_class
from edgc.plan.allocation import uniform_ranks
from edgc.plan.selection import Selection

# What all reductions under way may hold together, as a multiple of one unit's gradients in fp32. With three units that
# is 4/9 of the stage's gradients. Low rank writes its errors matrix by matrix, which brings the peak to the half that
# docs/algorithm.md, 7, names.
MOST_HELD = 4 / 3
ROUNDING_MEMORY = 6  # times the memory of a portion that rounding and summing it takes
LITTLE_BYTES = 2**26  # what a reduction may hold whatever others hold


class Router:
    """Gives gradients their routes under a plan.

    Args:
        selection: which parameters the engine takes.
        config: the run's settings.
        device: where the gradients live.
    """

    def __init__(self, selection: Selection, config: EDGCConfig, device: torch.device):
        self.selection = selection
        self.config = config
        self.device = device
        self.specs = {matrix.name: matrix for matrix in selection.matrices}
        self.specs.update((parameter.name, parameter.spec) for parameter, _ in selection.others)
        # The dense engine has nothing to compress, but its entropy is still wanted.
        self.engine: Engine | None = None
        if config.engine != "dense":
            arguments = engine_arguments(config.engine)
            self.engine = engine_class(config.engine)(selection.matrices, config, device, *arguments)
        self.ranks: dict[str, int] = {}
        self.formats: dict[str, str] = {}  # or engines, of parameters without a rank, where a plan sets them
        self.compressed = False  # whether the stage is, also where nothing here has a rank
        self.unrounded = False  # whether sums are those of fp32, whatever the settings
        self._elementwise: dict[str, Elementwise] = {}  # by wire format, or by name of an engine
        self._kernels = triton_kernels(device) if config.study.kernels == "fused" else None

    def set_rank(
        self,
        rank: int | None,
        matrix_ranks: Mapping[str, int] | None = None,
        formats: Mapping[str, str] | None = None,
        unrounded: bool = False,
    ) -> None:
        """Use this rank from the next reduction on, any for an engine that has none; None: do not compress.

        ``unrounded``: what is not compressed is not rounded to ``dense_wire`` either. The host's own sum will then do
        once all errors are sent.

        ``matrix_ranks`` may hold the rank of each matrix of the stage, ``formats`` the wire format, or the engine, of
        parameters that have none (default: ``rest_wire``). Of a matrix that is in both, rows travel first
        (``rows:SHARE``), and low rank has what that leaves. Raises ValueError for a low rank below 1.
        """
        if rank is not None and self.config.low_rank:
            lowest = min([rank] if matrix_ranks is None else matrix_ranks.values(), default=1)
            if lowest < 1:
                raise ValueError(f"rank {lowest}: the rank of a matrix must be at least 1")
        self.compressed = rank is not None and self.engine is not None
        self.formats = dict(formats or {})
        self.unrounded = unrounded and not self.compressed
        if rank is None or self.engine is None:
            self.ranks = {}
        elif matrix_ranks is not None:
            self.ranks = {name: matrix_ranks[name] for name in self.engine.matrices if name in matrix_ranks}
        elif self.config.low_rank:
            self.ranks = uniform_ranks(self.selection.matrices, rank, self.config.study.min_saving)
        else:
            self.ranks = dict.fromkeys(self.engine.matrices, rank)

    def elementwise(self, name: str) -> Elementwise:
        """The engine of a gradient without a rank, or the one that takes rows of a gradient before low rank does."""
        formats = self.config.formats
        uncompressed = "fp32" if self.unrounded else formats.dense_wire
        chosen = self.formats.get(name, formats.rest_wire) if self.compressed else uncompressed
        if chosen not in self._elementwise:
            engine, arguments = (
                (Rounding, (chosen,)) if chosen in FORMATS else (engine_class(chosen), engine_arguments(chosen))
            )
            self._elementwise[chosen] = engine(list(self.specs.values()), self.config, self.device, *arguments)
        return self._elementwise[chosen]

    @property
    def exact(self) -> bool:
        """Whether all sums are those of fp32."""
        return not self.ranks and all(self.elementwise(name).exact for name in self.specs)

    def memory(self, gradients: Mapping[str, Tensor]) -> float:
        """What a reduction of these holds to its end beside gradients and state, as a share of ``MOST_HELD``.

        That is about the new errors of all that is rounded, what rounding a portion takes, and two pairs of factors of
        each matrix in low rank. Errors of low rank come one matrix after another. 0 where it is little in any case.
        """
        if self.exact:
            return 0.0
        elements = rounded = factors = 0
        for name, gradient in gradients.items():
            elements += gradient.numel()
            low_rank = name in self.ranks and isinstance(self.engine, LowRank)
            if low_rank:
                factors += self.ranks[name] * (self.specs[name].rows + self.specs[name].cols)
            if not low_rank or gradient.dtype != torch.float32:
                rounded += gradient.numel()
        held = rounded + ROUNDING_MEMORY * min(rounded, portion_of(rounded)) + 2 * factors
        return held / elements / MOST_HELD if 4 * held > LITTLE_BYTES else 0.0

    def route(self, gradients: Mapping[str, Tensor], context: ReductionContext, measured: bool) -> list[Route]:
        """The routes of these gradients, each in one: that of the low-rank engine if it has a rank, else that of what
        ``elementwise`` gives. ``measured``: whether the reduction is.
        """
        ranked = {name: gradient for name, gradient in gradients.items() if name in self.ranks}
        others = {name: gradient for name, gradient in gradients.items() if name not in self.ranks}
        taken: dict[Elementwise, dict[str, Tensor]] = {}
        for name, gradient in others.items():
            taken.setdefault(self.elementwise(name), {})[name] = gradient
        found: list[Route] = [ElementwiseRoute(own, self.specs, context, engine) for engine, own in taken.items()]
        if not ranked:
            return found
        if isinstance(self.engine, LowRank):
            kernels = None if measured else self._kernels  # they leave nothing to measure
            before = {name: self.elementwise(name) for name in ranked if name in self.formats}
            first = {name: engine for name, engine in before.items() if isinstance(engine, Rows)}
            if kernels is not None and not first and FusedRoute.fits(kernels, ranked, self.ranks, context):
                found.append(FusedRoute(ranked, self.specs, context, self.engine, self.ranks, kernels))
            else:
                found.append(FactorRoute(ranked, self.specs, context, self.engine, self.ranks, first))
        elif isinstance(self.engine, Elementwise):
            found.append(ElementwiseRoute(ranked, self.specs, context, self.engine))
        return found
