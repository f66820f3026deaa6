"""The parameters of one layer of a Megatron model, by its flags."""

import argparse
from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """A transformer layer. ``heads``: width of all queries together; ``groups``: of all keys, and of all values.
    ``inside``: width within the MLP; ``gated``: it has a gate of that width beside (SwiGLU).
    """

    width: int
    heads: int
    groups: int
    inside: int
    gated: bool = False
    linear_bias: bool = True
    norm_bias: bool = True

    @classmethod
    def of(cls, flags: argparse.Namespace) -> "Layer":
        """By parsed flags of ``add_arguments``, with Megatron's defaults for what they do not say."""
        width = flags.hidden_size
        channels = flags.kv_channels or width // flags.num_attention_heads
        groups = flags.num_query_groups if flags.group_query_attention else flags.num_attention_heads
        usual = 64 * (8 * width // 3 // 64) if flags.swiglu else 4 * width
        return cls(
            width,
            flags.num_attention_heads * channels,
            groups * channels,
            flags.ffn_hidden_size or usual,
            flags.swiglu,
            not flags.disable_bias_linear,
            flags.normalization != "RMSNorm",
        )

    def matrices(self, tensor: int = 1) -> dict[str, tuple[int, int]]:
        """Rows and columns of its matrices on one of so many tensor-parallel processes."""
        return {
            "qkv": ((self.heads + 2 * self.groups) // tensor, self.width),
            "proj": (self.width, self.heads // tensor),
            "fc1": ((2 if self.gated else 1) * self.inside // tensor, self.width),
            "fc2": (self.width, self.inside // tensor),
        }

    @property
    def attention_elements(self) -> int:
        return sum(rows * cols for name, (rows, cols) in self.matrices().items() if name in ("qkv", "proj"))

    def mlp_elements(self, inside: int | None = None) -> int:
        """Of its MLP, or of one that is this wide inside."""
        return (3 if self.gated else 2) * self.width * (inside or self.inside)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that ``Layer.of`` reads."""
    for flag in ("--hidden-size", "--num-attention-heads"):
        parser.add_argument(flag, type=int, required=True)
    for flag in ("--ffn-hidden-size", "--kv-channels"):
        parser.add_argument(flag, type=int)
    parser.add_argument("--num-query-groups", type=int, default=1)
    for flag in ("--group-query-attention", "--swiglu", "--disable-bias-linear"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--normalization", default="LayerNorm")
