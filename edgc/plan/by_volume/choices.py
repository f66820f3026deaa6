"""The ways to send a parameter, of which a plan with a volume chooses one for each."""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, ClassVar

from edgc.config import EDGCConfig, RankPolicy
from edgc.plan.ranks import RANK_MULTIPLE
from edgc.specs import MatrixSpec

# What a plan chooses from: numbers of bits, and shares of the rows. Not tuned.
PLANNED_FORMATS = "int8", "int6", "int5", "int4", "int3", "int2"
ROW_SHARES = 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.14, 0.2, 0.3, 0.4
# Ranks are multiples of 4. From the first number on they are multiples of the second, and a sixth to an eleventh apart.
# Matrices of one shape and rank are handled at once, and of more large ranks fewer would be equal by chance. Not tuned.
LARGE_RANK, LARGE_RANK_MULTIPLE = 96, 16
# A parameter that is too small for low rank always travels in the second: it is a small part of the bytes, and noise in
# it costs much. Where all are rounded, the others travel in the first.
ROUNDED, ROUNDED_FINE = "int4", "int8"


@dataclass(frozen=True)
class SendLowRank:
    """The parameter travels at a rank."""

    rank: int
    format: ClassVar[None] = None
    method: ClassVar[str] = "low rank"
    encoding: ClassVar[str] = "low rank"

    def parts(self, matrix: MatrixSpec) -> int:
        """How many directions of this matrix travel in a step."""
        return self.rank


def rows_that_travel(share: float, rows: int) -> int:
    """The number of rows that is this share of so many, rounded up."""
    return math.ceil(share * rows - 1e-9)  # 0.07 of 100 is a little above 7 in binary


@dataclass(frozen=True)
class SendRows:
    """This share of the rows travels, the largest ones, and what they leave travels at a rank."""

    share: float
    rank: int
    method: ClassVar[str] = "rows"
    encoding: ClassVar[str] = "rows"

    @property
    def format(self) -> str:
        """The engine that sends the rows, with its argument."""
        return f"rows:{self.share:g}"

    def parts(self, matrix: MatrixSpec) -> int:
        """How many rows of this matrix travel in a step."""
        return rows_that_travel(self.share, matrix.rows)


@dataclass(frozen=True)
class SendRounded:
    """Every value of the parameter travels in a wire format."""

    format: str
    rank: ClassVar[None] = None
    method: ClassVar[str] = "rounding"

    @property
    def encoding(self) -> str:
        return self.format


# How a parameter travels. ``rank`` and ``format`` go into the plan of ranks; None where it has none. ``method``: one of
# the three. ``encoding``: the method, and of rounding the number of bits as well. After a change of the encoding, what
# the one before has left unsent is sent.
Choice = SendLowRank | SendRows | SendRounded


def to_list(choice: Choice) -> list[Any]:
    """Plain numbers and texts, of which ``from_list`` makes the choice again."""
    return [choice.method, *astuple(choice)]


def from_list(saved: Sequence[Any]) -> Choice:
    """What ``to_list`` was given."""
    method, *values = saved
    kinds: tuple[type[SendLowRank], type[SendRows], type[SendRounded]] = (SendLowRank, SendRows, SendRounded)
    return next(one for one in kinds if one.method == method)(*values)


def rounded_format(low_rank: bool) -> str:
    """The format of a parameter where all are rounded. ``low_rank``: low rank could take it."""
    return ROUNDED if low_rank else ROUNDED_FINE


def rest_format(config: EDGCConfig) -> str:
    """The format of parameters that are too small for low rank."""
    return ROUNDED_FINE if config.rank_policy is RankPolicy.VOLUME else config.formats.rest_wire


def bits_of(name: str) -> int:
    """The bits of a value in a wire format, without its share of a scale: 4 of int4."""
    return int(name.lstrip("abcdefghijklmnopqrstuvwxyz"))


def ranks_to_try(directions: int) -> list[int]:
    """The ranks that a plan chooses from, up to half of full rank, which is ``directions``."""
    ranks, rank = [], RANK_MULTIPLE
    while rank <= directions // 2:
        ranks.append(rank)
        rank += RANK_MULTIPLE if rank < LARGE_RANK else LARGE_RANK_MULTIPLE * (rank // LARGE_RANK)
    return ranks
