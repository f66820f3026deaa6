"""How messages between pipeline stages are compressed in a run, from its settings and what messages cost."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from edgc.config import BY_ENTROPY, ConfigError, EDGCConfig, Ranks
from edgc.plan.comm_cost import StageCost
from edgc.plan.ranks import RANK_MULTIPLE
from edgc.plan.run import link_rank
from megatron.edgc.message_costs import largest_message_rank, message_shape


def plan_messages(config: EDGCConfig, args: Namespace, costs: Mapping[int, StageCost]) -> tuple[EDGCConfig | None, str]:
    """The settings of the messages' controller, None where there is none; and a warning, empty where there is none.

    ``config`` has the ranks of gradients settled; ``costs``: of gradients on their way to the stage before, by sender.
    Raises ``ConfigError`` for a rank at which messages are not smaller.
    """
    messages = config.pipeline.messages
    if messages.which == "off":
        return None, ""
    if not messages.follows:
        limit = largest_message_rank(config, args, 1.0)
        if messages.rank is not None and messages.rank > limit:
            rows, cols = message_shape(args)
            raise ConfigError(
                f"--edgc-pp = {config.pipeline.pp}: messages of {rows} x {cols} values are smaller in low rank only up "
                f"to rank {limit}"
            )
        return message_config(config), ""
    usable = RANK_MULTIPLE * (largest_message_rank(config, args, config.study.min_saving) // RANK_MULTIPLE)
    if usable:
        usable = min([usable, *map(link_rank, costs.values())])
    if not usable:
        return uncompressed(config), (
            f"messages between stages stay uncompressed: no rank makes them {config.study.min_saving:g}x smaller and "
            f"takes no longer on this link. Give them a rank to compress them all the same, as in --edgc-pp "
            f"{messages.which}:powersgd:16"
        )
    config = message_config(config)
    ranks = config.ranks.settled
    return config.but(**{name: min(rank, usable) for name, rank in ranks.items() if rank is not None}), ""


def message_config(config: EDGCConfig) -> EDGCConfig:
    """The settings of the messages' controller: those of the gradients', but for a rank of their own.

    Spectra are measured of gradients alone, so where they set ranks the entropy of messages does.
    """
    messages = config.pipeline.messages
    own: dict[str, Any] = {
        "allocation": "uniform",
        "rank_tilt": 0.0,
        "dense_wire": "fp32",
        "pp": "off",
        "kernels": "plain",
        "volume": None,
    }
    if messages.follows:
        own["rank_model"] = "gaussian"
    else:
        own.update({one.name: one.default for one in fields(Ranks) if one.name in BY_ENTROPY})
        own.update(engine=messages.engine, static_rank=messages.rank)
    return config.but(**own)


def uncompressed(config: EDGCConfig) -> EDGCConfig:
    """The same, of messages that are not compressed after all."""
    return message_config(config).but(engine="dense", static_rank=None, rmin=None, rmax=None, rest_wire="fp32")
