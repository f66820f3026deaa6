"""What is compressed between the stages of a pipeline."""

from dataclasses import dataclass
from functools import cached_property

from edgc.config.formats import FORMATS
from edgc.config.setting import Settings, check, setting

# which messages between stages are compressed
MESSAGES = ("off", "auto", "auto-epilogue", "backward", "both", "epilogue")
MESSAGE_ENGINES = ("powersgd", "int8", "int4", "int2")


@dataclass(frozen=True)
class Messages:
    """How messages between pipeline stages are compressed.

    ``which``: see ``MESSAGES``. ``engine``: see ``MESSAGE_ENGINES``. ``rank`` and ``wire``: of low rank alone; None:
    the controller's rank; fp32, or bf16 for messages in 16 bits.
    """

    which: str = "off"
    engine: str = "powersgd"
    rank: int | None = None
    wire: str | None = None

    @classmethod
    def of(cls, text: str) -> "Messages":
        """WHICH, WHICH:ENGINE, WHICH:powersgd:RANK or WHICH:powersgd:RANK:FORMAT. Raises ``ConfigError`` for others."""

        def require(holds: bool, rule: str) -> None:
            check(holds, Pipeline.flag("pp"), text, rule)

        which, *rest = text.split(":")
        require(which in MESSAGES, f"must begin with one of {', '.join(MESSAGES)}")
        if not rest:
            return cls(which)
        require(which != "off", "nothing is compressed: nothing may follow off")
        engine, *details = rest
        require(engine in MESSAGE_ENGINES, f"{which}: must be followed by one of {', '.join(MESSAGE_ENGINES)}")
        rule = "a rank, and a format of factors behind it, may only follow powersgd"
        require(not details or (engine == "powersgd" and len(details) <= 2), rule)
        rank, wire = [*details, None, None][:2]
        require(rank is None or (rank.isdecimal() and int(rank) >= 1), "a rank must be a whole number from 1")
        require(wire is None or wire in FORMATS, f"the format must be one of {', '.join(FORMATS)}")
        return cls(which, engine, None if rank is None else int(rank), wire)

    @property
    def optional(self) -> bool:
        """Whether a run that cannot compress messages may leave them as they are."""
        return self.which in ("off", "auto", "auto-epilogue")

    @property
    def epilogue(self) -> bool:
        """Whether only those are compressed for which the receiving stage would wait idle."""
        return self.which in ("epilogue", "auto-epilogue")

    @property
    def needs_rank(self) -> bool:
        """Whether they take a rank that is not their own: entropy's, or that of the gradients."""
        return self.which != "off" and self.engine == "powersgd" and self.rank is None


@dataclass(frozen=True, kw_only=True)
class Pipeline(Settings):
    """What is done between the stages of a pipeline."""

    pp: str = setting(
        "off",
        "which messages between pipeline stages are compressed, and how. Which: gradients (backward), gradients and "
        "activations (both), or gradients for which the receiving stage would wait idle (epilogue). auto and "
        "auto-epilogue are backward and epilogue, but only where the run's pipeline allows it and it saves time. How: "
        "rounded (int8, int4, int2) or in low rank (powersgd). powersgd takes the rank that entropy sets or the "
        "gradients have, powersgd:16 takes rank 16. powersgd:16:int8 also says in which format the factors travel. "
        "Without a how, the preset's or powersgd",
        "which:how",
        "Optimus-CC, ASPLOS 2023; rounding: arXiv 2306.10209; docs/algorithm.md, 8",
    )
    fuse_embedding_sync: bool | None = setting(
        None,
        "sum the gradient of a tied embedding once, over the processes of the first and the last pipeline stage; "
        "Megatron sums it over each stage and then between the two (default: on where there is a tied embedding, off "
        "with the engine dense, the preset paper and --mtp-num-layers)",
        "switch",
        "Optimus-CC, ASPLOS 2023",
    )

    def __post_init__(self) -> None:
        self.require_kinds()
        _ = self.messages  # so that a wrong pp raises here

    @cached_property
    def messages(self) -> Messages:
        """What ``pp`` says."""
        return Messages.of(self.pp)
