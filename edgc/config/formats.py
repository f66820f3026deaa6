"""The formats in which values travel and errors are stored."""

from dataclasses import dataclass
from functools import cached_property

from edgc.config.setting import Settings, check, setting

FORMATS = ("fp32", "bf16", "fp16", "fp8", "int8", "int6", "int5", "int4", "int3", "int2", "int1")  # comm/wire.py
WEIGHT_FORMATS = ("fp8", "int8", "int6", "int5", "int4")


@dataclass(frozen=True)
class GatheredWeights:
    """How weights travel that the distributed optimizer has updated.

    ``format``: of their differences from the weights before, of ``WEIGHT_FORMATS``; None: the host's own all-gather.
    ``optional``: a run that cannot send differences, or whose link is no faster with them, leaves them to the host.
    """

    format: str | None = None
    optional: bool = True

    @classmethod
    def of(cls, text: str) -> "GatheredWeights":
        """off, FORMAT or auto:FORMAT. Raises ``ConfigError`` for others."""
        if text == "off":
            return cls()
        name = text.removeprefix("auto:")
        rule = f"must be off, or one of {', '.join(WEIGHT_FORMATS)}, perhaps with auto: before it"
        check(name in WEIGHT_FORMATS, Formats.flag("param_wire"), text, rule)
        return cls(name, optional=text.startswith("auto:"))


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
        f"format of powersgd's first factor, one of {', '.join(FORMATS)}; in int5+int3 the strongest quarter of its "
        "columns is in int5, the others are in int3",
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
    param_wire: str = setting(
        "off",
        "format in which the distributed optimizer's updated weights travel, as differences from the weights before, "
        f"one of {', '.join(WEIGHT_FORMATS)}. With auto: before it (auto:int8) only where the run allows it and it "
        "saves time; off: in Megatron's own all-gather",
        "format",
        "SDP4Bit: arXiv 2410.15526",
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
        _ = self.weights  # so that a wrong param_wire raises here

    @cached_property
    def weights(self) -> GatheredWeights:
        """What ``param_wire`` says."""
        return GatheredWeights.of(self.param_wire)

    @property
    def basis_wires(self) -> tuple[str, str]:
        """The formats of the stronger and of the weaker columns of powersgd's first factor."""
        strong, _, weak = self.basis_wire.partition("+")
        return strong, weak or strong
