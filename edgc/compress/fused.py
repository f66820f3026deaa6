"""Low rank through Triton's kernels (``edgc.compress.kernels``), in fewer passes over the gradients."""

import importlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from types import ModuleType

import torch
from torch import Tensor
from torch.profiler import record_function

from edgc.comm.packed import Packed
from edgc.compress.batch import Batch, Operand
from edgc.compress.engines.base import FactoredSums, LowRank
from edgc.compress.routes.base import ReductionContext
from edgc.compress.routes.low_rank import FactorRoute
from edgc.specs import MatrixSpec


def triton_kernels(device: torch.device) -> ModuleType | None:
    """The fused kernels where they run: on NVIDIA's GPUs from Ampere on, and anywhere in Triton's interpreter."""
    able = (
        device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 0)
    )
    if not (able or os.environ.get("TRITON_INTERPRET") == "1") or importlib.util.find_spec("triton") is None:
        return None
    major, minor, *_ = importlib.import_module("triton").__version__.split(".")
    return importlib.import_module("edgc.compress.kernels") if (int(major), int(minor)) >= (3, 3) else None


class FusedBatch(Batch):
    """A batch whose first product also unscales each gradient and adds its error, in one pass of a Triton kernel.

    ``errors``: fp32 or bf16, of the operands' shapes; a name may be missing. ``loss_scale``: 0-dimensional. ``gain``:
    the share of an error that is added.
    """

    def __init__(
        self,
        kernels: ModuleType,
        operands: Mapping[str, Operand],
        errors: Mapping[str, Tensor],
        loss_scale: Tensor | None,
        gain: float,
    ):
        super().__init__(operands)
        self._kernels = kernels
        self._errors = errors
        self._loss_scale = loss_scale
        self._gain = gain
        self._unprepared = set(operands)  # shared with the transposed batch

    @property
    def T(self) -> "FusedBatch":  # noqa: N802 - as of a tensor
        errors = {name: error.T for name, error in self._errors.items()}
        operands = {name: one.T for name, one in self.items()}
        batch = FusedBatch(self._kernels, operands, errors, self._loss_scale, self._gain)
        batch._unprepared = self._unprepared
        return batch

    def multiplied_by(self, factors: Sequence[Tensor]) -> list[Tensor]:
        products = []
        for (name, operand), factor in zip(self.items(), factors, strict=True):
            divided = factor if operand.scales is None else factor / operand.scales[0].T
            if name in self._unprepared:
                error = self._errors.get(name)
                product = self._kernels.project(operand.matrix, divided, error, self._loss_scale, self._gain)
                self._unprepared.remove(name)
            else:
                product = self._kernels.project(operand.matrix, divided)
            products.append(product if operand.scales is None else product / operand.scales[1])
        return products


class FusedRoute(FactorRoute):
    """A ``FactorRoute`` through Triton's kernels: fewer passes over the gradients, all of them fp32."""

    def __init__(
        self,
        gradients: Mapping[str, Tensor],
        specs: Mapping[str, MatrixSpec],
        context: ReductionContext,
        engine: LowRank,
        ranks: Mapping[str, int],
        kernels: ModuleType,
    ):
        super().__init__(gradients, specs, context, engine, ranks)
        self.kernels = kernels

    @staticmethod
    def fits(
        kernels: ModuleType, gradients: Mapping[str, Tensor], ranks: Mapping[str, int], context: ReductionContext
    ) -> bool:
        """Whether the kernels take these gradients, ranks and errors."""
        kept_in = context.feedback.rule.wire
        errors = kept_in.bits >= 16 and not kept_in.floating
        narrow = any(gradient.dtype != torch.float32 for gradient in gradients.values())
        return errors and not narrow and max(ranks.values(), default=0) <= kernels.LARGEST_RANK

    def prepare(self, excess: Mapping[str, Tensor]) -> None:
        """The first product unscales and adds errors."""
        self.excess = excess

    def _batch(self, operands: Mapping[str, Operand]) -> Batch:
        packed = self.context.feedback.packed
        errors = {}
        for name, operand in operands.items():
            if name in packed:
                error = packed[name].stored().view_as(self.matrices[name])
                errors[name] = error.T if operand.transposed else error
        return FusedBatch(self.kernels, operands, errors, self.context.loss_scale, self.error_gain)

    def _write(self, factored: FactoredSums, finite: Tensor) -> None:
        feedback, loss_scale = self.context.feedback, self.context.loss_scale
        for name, matrix in self.matrices.items():
            older = feedback.packed[name].stored().view_as(matrix) if name in feedback.packed else None
            error = torch.empty_like(matrix, dtype=torch.float32 if feedback.rule.wire.exact else torch.bfloat16)
            seed = feedback.draw(name, "error", self.context.iteration) >> 32
            share, total, rows, excess = (
                factored.shares[name],
                factored.sums[name],
                self._own_rows(name),
                self.excess[name],
            )
            with record_function("edgc/write back"):
                self.kernels.write_back(
                    matrix, share, total, finite, older, error, rows, loss_scale, seed, excess, 1 - self.error_gain
                )
            message = error.view(1, -1).view(torch.uint8)
            feedback.packed[name] = Packed.restored(message, matrix.shape, feedback.rule.wire)
