"""How messages between pipeline stages are compressed in a run, from its settings and what messages cost."""

from argparse import Namespace
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from edgc.config import BY_ENTROPY, ConfigError, EDGCConfig, Messages, Ranks, flag
from edgc.plan.rank_plan import NO_RANK
from edgc.plan.ranks import RANK_MULTIPLE
from edgc.plan.times.comm_cost import LEAST_GAIN, StageCost
from megatron.edgc.messages.costs import largest_message_rank, message_shape


@dataclass(frozen=True)
class MessageChoice:
    """How a run compresses messages.

    ``settings``: of their controller; None where there is none. ``left_alone``: the stages, counted from 0, whose
    messages stay as they are because compressing them saves no time. ``warning``: empty where there is none.
    """

    settings: EDGCConfig | None = None
    left_alone: frozenset[int] = frozenset()
    warning: str = ""


def choose_messages(config: EDGCConfig, args: Namespace, costs: Mapping[int, StageCost]) -> MessageChoice:
    """How messages are compressed, and where.

    ``config`` has the ranks of gradients resolved; ``costs``: of gradients on their way to the stage before, by sender.
    Raises ``ConfigError`` for a rank at which messages are not smaller.
    """
    messages = config.pipeline.messages
    if messages.which == "off":
        return MessageChoice()
    if not messages.needs_rank:
        limit = largest_message_rank(config, args, 1.0)
        if messages.rank is not None and messages.rank > limit:
            rows, cols = message_shape(args)
            raise ConfigError(
                f"--edgc-pp = {config.pipeline.pp}: messages of {rows} x {cols} values are smaller in low rank only up "
                f"to rank {limit}"
            )
        slower = _slower(messages, costs) if messages.optional else frozenset()
        return MessageChoice(message_config(config), slower, _warning(config, costs, slower))
    usable = RANK_MULTIPLE * (largest_message_rank(config, args, config.study.min_saving) // RANK_MULTIPLE)
    if usable:
        usable = min([usable, *(cost.largest_rank(cost.host_seconds) for cost in costs.values())])
    if not usable:
        warning = (
            f"messages between stages stay uncompressed: no rank makes them {config.study.min_saving:g}x smaller and "
            f"takes no longer on this link. Give them a rank to compress them all the same, as in --edgc-pp "
            f"{messages.which}:powersgd:16"
        )
        return MessageChoice(without_compression(config), warning=warning)
    config = message_config(config)
    ranks = config.ranks.resolved
    return MessageChoice(
        config.replace(**{name: min(rank, usable) for name, rank in ranks.items() if rank is not None})
    )


def _slower(messages: Messages, costs: Mapping[int, StageCost]) -> frozenset[int]:
    """The stages whose messages compression makes no faster.

    The link on which the first stage of a virtual pipeline sends is not timed. Its messages stay as they are if all
    others do.
    """
    rank = messages.rank or NO_RANK
    slower = {sender for sender, cost in costs.items() if cost.dense_seconds < LEAST_GAIN * cost.seconds(rank)}
    return frozenset({0, *slower} if slower and slower == set(costs) else slower)


def _warning(config: EDGCConfig, costs: Mapping[int, StageCost], slower: Collection[int]) -> str:
    """Empty where all messages are compressed."""
    messages = config.pipeline.messages
    rank = messages.rank or NO_RANK
    timed = [
        f"{1e3 * cost.seconds(rank):.2f} ms against {1e3 * cost.dense_seconds:.2f} ms from stage {sender + 1}"
        for sender, cost in sorted(costs.items())
        if sender in slower
    ]
    if not timed:
        return ""
    asked = config.pipeline.pp.replace(messages.which, "epilogue" if messages.epilogue else "backward", 1)
    return (
        f"messages between stages stay uncompressed where compressing them saves no time: {', '.join(timed)}. Give "
        f"{flag('pp')} {asked} to compress them all the same"
    )


def message_config(config: EDGCConfig) -> EDGCConfig:
    """The settings of the messages' controller: those of the gradients', but for a rank of their own.

    Spectra are measured of gradients alone, so where they set ranks the entropy of messages does.
    """
    messages = config.pipeline.messages
    own: dict[str, Any] = {
        "allocation": "uniform",
        "rank_tilt": 0.0,
        "dense_wire": "fp32",
        "rest_wire": "fp32",
        "pp": "off",
        "kernels": "plain",
        "volume": None,
    }
    if messages.needs_rank:
        own["rank_model"] = "gaussian"
    else:
        own.update({one.name: one.default for one in fields(Ranks) if one.name in BY_ENTROPY})
        own.update(engine=messages.engine, static_rank=messages.rank)
    return config.replace(**own)


def without_compression(config: EDGCConfig) -> EDGCConfig:
    """The same, of messages that are not compressed after all."""
    return message_config(config).replace(engine="dense", static_rank=None, rmin=None, rmax=None)
