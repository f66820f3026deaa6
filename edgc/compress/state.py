"""What reductions remember from step to step: errors, an engine's bases, scales, running norms."""

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from edgc.comm.collectives import Communicator, run_to_end
from edgc.comm.packed import Packed
from edgc.comm.wire import FP32, wire
from edgc.compress.engines.base import Engine
from edgc.compress.equaliser import Equaliser
from edgc.compress.error_feedback import ErrorFeedback, ErrorRule
from edgc.compress.spikes import RunningNorms
from edgc.config import EDGCConfig
from edgc.observe.fidelity import LARGEST_SAMPLE, SUMS_PER_ENTRY, FidelitySampler


class CompressionState:
    """The state of one reducer; its parts are keyed by parameter name.

    Args:
        config: the run's settings.
        engine: whose state is a part of it; None without one.
        device: where the tensors are.
        process: the number of this process in its data-parallel group.
        sparse_rows: names of parameters (``edgc.specs.Parameter``).
    """

    def __init__(
        self,
        config: EDGCConfig,
        engine: Engine | None,
        device: torch.device,
        process: int,
        sparse_rows: Collection[str] = (),
    ):
        kept_in = wire(config.formats.error_dtype, stochastic=config.formats.error_dtype != "fp32")
        self.feedback = ErrorFeedback(ErrorRule(kept_in), device, config.seed, process)
        self.norms = RunningNorms(config.study.spike_limit)
        self.equaliser = Equaliser(sparse_rows)
        share = config.fidelity_share / (SUMS_PER_ENTRY * config.ranks.iteration_sampling_rate)
        if config.study.fidelity_share is None:  # what is sampled rarely would take much memory
            share = min(share, LARGEST_SAMPLE)
        self.fidelity = FidelitySampler(share, config.seed) if share else None
        self.engine = engine
        self._iteration: int | None = None
        self._before: dict[str, dict[str, Packed]] = {}  # the state before that iteration

    def keep(self, iteration: int) -> None:
        """Keep the state of before this iteration for ``roll_back``."""
        self._iteration, self._before = iteration, self.state_dict()

    def roll_back(self, iteration: int) -> None:
        """Undo what this iteration has done, if the state of before it was kept."""
        if iteration == self._iteration:
            self.load_state_dict(self._before)

    def forget(self) -> None:
        """Drop what ``keep`` has kept."""
        self._iteration, self._before = None, {}

    def bytes(self) -> int:
        """Memory between two reductions, that of a kept state included."""
        return sum(message.nbytes for message in self.tensors())

    def tensors(self) -> list[Tensor]:
        """All of it, that of a kept state included, each once."""
        states = [self.state_dict(), self._before]
        messages = [p.message for state in states for part in state.values() for p in part.values()]
        return list({(message.data_ptr(), message.nbytes): message for message in messages}.values())

    def state_dict(self) -> dict[str, dict[str, Packed]]:
        """All that the next reduction depends on beside its rank; tensors that are replaced, never changed."""
        return {
            "error": dict(self.feedback.packed),
            "engine": self.engine.state_dict() if self.engine is not None else {},
            "equaliser": self.equaliser.state_dict(),
            "norms": self.norms.state_dict(),
            "fidelity": {}
            if self.fidelity is None
            else {
                f"{name}:averages of seed {self.fidelity.seed}": Packed(averages, FP32)
                for name, averages in self.fidelity.averages.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Packed]]) -> None:
        """Continue from ``state_dict``."""
        self.feedback.packed = dict(state["error"])
        self.equaliser.load_state_dict(state["equaliser"])
        self.norms.load_state_dict(state["norms"])
        if self.fidelity is not None:
            kept = state["fidelity"]
            own = f":averages of seed {self.fidelity.seed}"
            self.fidelity.averages = {
                key.removesuffix(own): packed.values() for key, packed in kept.items() if key.endswith(own)
            }
        if self.engine is not None:
            self.engine.load_state_dict(state["engine"])

    def summed_errors(self, communicator: Communicator, iteration: int) -> Iterator[tuple[str, Tensor]]:
        """The sum of each error over the group, fp32, by name; each process continues with an equal part of it.

        Only the sum matters to training, so it is what a checkpoint holds, whatever the number of processes. Every
        process of the group must run this to its end.
        """
        uncounted = Communicator.uncounted(communicator.group)
        norms = self.norms.values()
        if norms is not None:  # each process has seen its own gradients: all continue with the mean of those seen
            both = torch.cat([norms, (norms > 0).float()])
            total, seen = run_to_end(uncounted.all_reduce(both)).chunk(2)
            self.norms.set_values(total / seen.clamp_min(1))
        for name in sorted(self.feedback.packed):
            error = self.feedback.packed[name].values()
            total = run_to_end(uncounted.all_reduce(error.flatten().clone())).view_as(error)
            self.feedback.share(name, total, communicator.world_size, iteration)
            yield name, total

    def share_errors(self, totals: Mapping[str, Tensor], communicator: Communicator, iteration: int) -> None:
        """Take this process's part of sums, on any device, that ``summed_errors`` gave at this iteration."""
        for name in sorted(totals):
            self.feedback.share(name, totals[name], communicator.world_size, iteration)
