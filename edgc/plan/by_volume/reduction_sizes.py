"""What sending a parameter takes in bytes, by which a budget chooses."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edgc.plan.by_volume.noise import ENERGY_OF_VECTORS, STEEPNESS_OF_DIRECTIONS, STEEPNESS_OF_ROWS, EnergySpectrum
from edgc.plan.by_volume.parameters import PartialSend, PlannedParameter
from edgc.plan.run import Run
from edgc.plan.stages import StageKind, StagePlan
from edgc.specs import MatrixSpec


@dataclass(frozen=True)
class ReductionSizes:
    """Bytes that an all-reduce sends of a parameter, in each way to send it. A reduce-scatter sends half of them.

    ``factors``: of the two factors of a matrix, for each rank. ``rows``: of one row of a matrix, and of what says which
    rows were chosen. ``row_format``: the format of rows. ``bytes_per_value``: of one rounded value, by format.
    ``uncompressed``: of one value while nothing is compressed.
    """

    factors: Callable[[MatrixSpec], float]
    rows: Callable[[MatrixSpec], tuple[float, float]]
    row_format: str
    bytes_per_value: Mapping[str, float]
    uncompressed: float
    run: Run

    def parameters(self, stage: StagePlan) -> list[PlannedParameter]:
        """The parameters of a stage that sends any."""
        if self.run.alone and stage.key.kind is StageKind.LAYERS:
            return []
        price, found = self.price(stage.key.kind), []
        # the two stages of a tied embedding need all of its sum
        rounded_price = 1 / self.run.rounded_share if stage.key.kind is StageKind.EMBEDDING else 1.0
        for one in stage.selection.matrices:
            spectrum = EnergySpectrum(min(one.rows, one.cols), STEEPNESS_OF_DIRECTIONS)
            directions = PartialSend(spectrum, self.factors(one))
            rows: PartialSend | None = None
            # The rows of a layer are no choice: of queries, keys and values in one matrix the values have the largest,
            # and what queries and keys need would wait.
            if one.embedding:
                rows = PartialSend(EnergySpectrum(one.rows, STEEPNESS_OF_ROWS), *self.rows(one), self.row_format)
            found.append(PlannedParameter(one, directions, rows, price, rounded_price))
        others = [parameter for parameter, _ in stage.selection.others if parameter.elements]
        return found + [PlannedParameter(one.spec, price=price, energy=ENERGY_OF_VECTORS) for one in others]

    def price(self, kind: StageKind) -> float:
        """The price of a stage's bytes; that of layers is 1. Of so many bytes each of n processes sends a share of
        (n - 1) / n. Two stages, so twice as many processes, sum a tied embedding, and both send it.
        """
        replicas, experts = self.run.replicas, self.run.expert_replicas
        if kind is StageKind.LAYERS or self.run.alone or (kind is StageKind.EXPERTS and experts == 1):
            return 1.0
        processes, stages = (experts, 1) if kind is StageKind.EXPERTS else (2 * replicas, 2)
        return stages * ((processes - 1) / processes) / ((replicas - 1) / replicas)
