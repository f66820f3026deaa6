"""How messages between pipeline stages are compressed in a run, from its settings and what messages cost."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edgc.config import ConfigError, EDGCConfig, flag
from edgc.plan.alignment import RANK_MULTIPLE
from edgc.plan.controller import NO_RANK, StageCost
from edgc.plan.run import MESSAGES_OFF
from megatron.edgc.message_costs import largest_message_rank, message_break_even, message_shape

RANKS = "rmin", "rmax", "static_rank"


def plan_messages(
    config: EDGCConfig, requested: EDGCConfig, args: Namespace, costs: Mapping[int, StageCost]
) -> tuple[EDGCConfig | None, str]:
    """The settings of the messages' controller, None where there is none; and a warning, empty where there is none.

    ``config`` has the ranks of gradients settled, ``requested`` is what the user gave; ``costs``: of gradients on their
    way to the stage before, by sender. Raises ``ConfigError`` for a rank at which messages are not smaller.
    """
    if config.pp == "off":
        return None, ""
    if not config.pp_follows:
        limit = largest_message_rank(config, args, 1.0)
        if config.pp_rank is not None and config.pp_rank > limit:
            rows, cols = message_shape(args)
            raise ConfigError(
                f"{flag('pp_rank')} = {config.pp_rank}: messages of {rows} x {cols} values are smaller in low rank "
                f"only up to rank {limit}"
            )
        level = config.pp_rank or NO_RANK
        slower = any(cost.compressed.seconds(level) > cost.dense_seconds for cost in costs.values())
        if requested.pp == "auto" and slower:
            return uncompressed(config), (
                f"on this link messages between stages take longer in {config.pp_engine} than as they are: they "
                f"stay uncompressed. Give {flag('pp')} backward to compress them all the same"
            )
        return message_config(config), ""
    usable = RANK_MULTIPLE * (largest_message_rank(config, args, config.study.min_saving) // RANK_MULTIPLE)
    if usable:
        usable = min([usable, *map(message_break_even, costs.values())])
    if not usable:
        return uncompressed(config), (
            f"messages between stages stay uncompressed: no rank makes them {config.study.min_saving:g}x smaller and "
            f"takes no longer on this link. Give {flag('pp_rank')} to compress them all the same"
        )
    config = message_config(config)
    ranks = {name: getattr(config, name) for name in RANKS}
    return replace(config, **{name: min(rank, usable) for name, rank in ranks.items() if rank is not None}), ""


def message_config(config: EDGCConfig) -> EDGCConfig:
    """The settings of the messages' controller: those of the gradients', but for a rank of their own.

    Spectra are measured of gradients alone, so where they set ranks the entropy of messages does.
    """
    study = replace(config.study, rank_tilt=0.0)
    own: dict[str, Any] = {"allocation": "uniform", "study": study, "dense_wire": "fp32", **MESSAGES_OFF}
    if not config.pp_follows:
        own.update(engine=config.pp_engine, static_rank=config.pp_rank, rank_model="constant", rmin=None, rmax=None)
    elif config.rank_model in ("measured", "residual"):
        own["rank_model"] = "gaussian"
    return replace(config, **own)


def uncompressed(config: EDGCConfig) -> EDGCConfig:
    """The same, of messages that are not compressed after all."""
    return replace(message_config(config), engine="dense", static_rank=None, rmin=None, rmax=None)
