"""Which ranks there are, and those that a run's settings ask for."""

from edgc.config import EDGCConfig, RankPolicy

RANK_MULTIPLE = 4  # tensor-core friendly ranks


def resolve_ranks(config: EDGCConfig, break_even: int, width: int) -> EDGCConfig:
    """Make ranks of shares of the width; ``rmax`` is the break-even rank by default, and ``rmin`` a quarter of rmax.

    ``break_even``: the smallest, over the stages, of the largest ranks that are not slower than dense; a share is at
    most that. ``width``: the smaller side of most matrices (``selection.width``). Source of the quarter: the paper has
    r_max/4 to r_max/6. Raises ``ConfigError`` for an rmin above that rmax.
    """

    def known(rank: float | None, most: float = break_even) -> int:
        if rank is None:
            return rank_below(most)
        return int(rank) if rank >= 1 else rank_below(min(most, rank * width))

    if config.ranks.static_rank is not None:
        tilted = 1 + abs(config.study.rank_tilt)  # times this rank is the largest of the run
        return config.replace(static_rank=known(config.ranks.static_rank, break_even / tilted))
    rmax = known(config.ranks.rmax)
    if config.rank_policy is RankPolicy.VOLUME:
        return config.replace(rmax=rmax)
    rmin = min(rmax, rank_below(rmax / 4)) if config.ranks.rmin is None else config.ranks.rmin
    return config.replace(rmin=rmin, rmax=rmax)


def static_ranks(config: EDGCConfig) -> tuple[int, int] | None:
    """The smallest and largest rank of a run whose ``static_rank`` is resolved."""
    rank, tilt = config.ranks.resolved_static_rank, abs(config.study.rank_tilt)
    if rank is None:
        return None
    return (nearest_rank(rank * (1 - tilt)), nearest_rank(rank * (1 + tilt))) if tilt else (rank, rank)


def smallest_rank(config: EDGCConfig) -> int:
    """The smallest rank that a run can have, as far as ``config`` says it."""
    static = static_ranks(config)
    return static[0] if static else config.ranks.rmin or RANK_MULTIPLE


def nearest_rank(rank: float) -> int:
    """Rounded to a multiple of 4, at least 4."""
    return max(RANK_MULTIPLE, RANK_MULTIPLE * round(rank / RANK_MULTIPLE))


def rank_below(rank: float) -> int:
    """Rounded down to a multiple of 4, at least 4."""
    return max(RANK_MULTIPLE, RANK_MULTIPLE * int(rank // RANK_MULTIPLE))
