"""The matrices of one pipeline stage of a model of configs/models/."""

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor

from edgc.specs import MatrixSpec
from tools.launching.configs import CLUSTERS, MODELS, Cluster, LaunchError, Model, read, split_flags
from tools.shared.layer import Layer, add_arguments


@dataclass(frozen=True)
class Stage:
    """The matrices of one pipeline stage without embeddings, of one tensor-parallel process. ``linear_bias``,
    ``norm_bias``: whether its linear layers and its norms have biases.
    """

    title: str
    matrices: tuple[MatrixSpec, ...]
    data_parallel: int
    linear_bias: bool = True
    norm_bias: bool = True

    @property
    def elements(self) -> int:
        return sum(matrix.elements for matrix in self.matrices)

    @classmethod
    def of(cls, name: str, layers: int | None) -> "Stage":
        """From a file in configs/models/; ``layers``: at most so many. Raises ``LaunchError``, for experts as well."""
        model = read(Model, MODELS, name)
        cluster = read(Cluster, CLUSTERS, model.cluster)
        parser = argparse.ArgumentParser(allow_abbrev=False)
        add_arguments(parser)
        parser.add_argument("--num-layers", type=int, required=True)
        for flag in ("--tensor-model-parallel-size", "--pipeline-model-parallel-size"):
            parser.add_argument(flag, type=int, default=1)
        parser.add_argument("--num-experts")
        flags, _ = parser.parse_known_args(split_flags(model.flags, model.name))
        if flags.num_experts is not None:
            raise LaunchError(f"{model.name}: --num-experts: only tools/plan.py counts experts")
        across, stages = flags.tensor_model_parallel_size, flags.pipeline_model_parallel_size
        layer = Layer.of(flags)
        shapes = layer.matrices(across)
        count = min(flags.num_layers // stages, layers or flags.num_layers)
        matrices = [MatrixSpec(f"{place}.{name}", *shape) for place in range(count) for name, shape in shapes.items()]
        processes = cluster.nodes * cluster.gpus_per_node
        return cls(
            f"{model.title}, {count} layers of a stage",
            tuple(matrices),
            processes // (across * stages),
            layer.linear_bias,
            layer.norm_bias,
        )

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        sizes = [matrix.elements for matrix in self.matrices]
        parts = torch.split(flat, sizes)
        return {m.name: part.view(m.rows, m.cols) for m, part in zip(self.matrices, parts, strict=True)}

    def factor_elements(self, rank: int) -> int:
        return sum(rank * (matrix.rows + matrix.cols) for matrix in self.matrices)
