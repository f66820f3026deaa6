"""The formats in which values travel and errors are stored."""

from dataclasses import dataclass

from edgc.config.setting import Settings, setting

FORMATS = ("fp32", "bf16", "fp16", "fp8", "int8", "int6", "int5", "int4", "int3", "int2", "int1")  # comm/wire.py


@dataclass(frozen=True, kw_only=True)
class Formats(Settings):
    """The formats in which values travel and errors are stored."""

    dense_wire: str = setting(
        "fp32",
        "format of all gradients of a stage that is not compressed, as in the warm-up; all formats but fp32 have error "
        "feedback",
        "format",
        "EDGC's own",
        FORMATS,
    )
    rest_wire: str = setting(
        "fp32",
        "format of parameters that low rank does not compress (embeddings, one-dimensional parameters, small matrices)",
        "format",
        "EDGC's own",
        FORMATS,
    )
    basis_wire: str = setting(
        "fp32",
        f"format of powersgd's first factor, one of {', '.join(FORMATS)}; in int6+int4 the strongest quarter of its "
        "columns is in int6, the others are in int4",
        "format",
        "EDGC's own",
    )
    wire: str = setting(
        "fp32",
        "format in which low-rank factors travel; of powersgd, the second factor",
        "format",
        "EDGC's own",
        FORMATS,
    )
    param_wire: str | None = setting(
        None,
        "format in which the distributed optimizer's updated weights travel, as differences from the previous weights "
        "(default: Megatron's own all-gather)",
        "format",
        "SDP4Bit: arXiv 2410.15526",
        ("fp8", "int8", "int6", "int5", "int4"),
    )
    error_dtype: str = setting(
        "fp32",
        "format in which the error feedback is stored; all formats but fp32 round at random, without bias",
        "format",
        "arXiv 1905.13727; rounding: arXiv 1502.02551",
        ("fp32", "bf16", "fp16", "fp8", "int8"),
    )

    def __post_init__(self) -> None:
        self.require_kinds()
        parts = self.basis_wire.split("+")
        rule = f"must be one of {', '.join(FORMATS)}, or two of them with a plus sign between"
        self.require("basis_wire", len(parts) <= 2 and set(parts) <= set(FORMATS), rule)

    @property
    def basis_wires(self) -> tuple[str, str]:
        """The formats of the stronger and of the weaker columns of powersgd's first factor."""
        strong, _, weak = self.basis_wire.partition("+")
        return strong, weak or strong
