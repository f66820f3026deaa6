"""What the planner says of a cluster: a table over links, a recommendation, and a step as a timeline."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from edgc.plan.times.comm_cost import LEAST_GAIN
from edgc.plan.times.link_times import CLEARLY_FASTER, MAX_TIME_RATIO
from tools.planning.contenders import Contender
from tools.planning.placement import Network
from tools.planning.prediction import Prediction
from tools.planning.simulation import Step
from tools.planning.training import LATENCY, REACHED, Training
from tools.shared.markdown import header, rank_in_words, row
from tools.shared.pictures import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY_BLUE, VERMILION, YELLOW, panels, tidy, to_png

COLORS = {
    "forward": SKY_BLUE,
    "backward": BLUE,
    "message": GREY,
    "compress": ORANGE,
    "reduce": VERMILION,
    "optimizer": GREEN,
    "gather": PURPLE,
}
PAPER = "up to 46.45 % less communication latency and 16.13 % less training time"
EDGC = ("int8", "int4", "safe", "balanced", "fast")  # of whose loss there are runs; the one with most bytes first
DRAWN = "balanced"  # of whose step there is a timeline
_LINES = {"dense fp32": GREY, "dense bf16": GREY, "PowerSGD, rank 64": ORANGE, "balanced": VERMILION, "fast": YELLOW}


def recommended(predictions: Sequence[Prediction]) -> tuple[Prediction, str]:
    """Of one link: what to train with, and why. Of what is about as fast, what has most bytes.

    A constant rank is not among them, because nothing is known of its loss on these models.
    """
    dense = min((one for one in predictions if not one.contender.method), key=lambda one: one.run_seconds)
    own = [one for one in predictions if one.contender.name in EDGC]  # one may compress messages between stages alone
    fastest = min(own, key=lambda one: one.run_seconds)
    if fastest.run_seconds > 0.99 * dense.run_seconds:
        tried = ", ".join(f"`{name}`" for name in EDGC)
        return dense, f"none of {tried} would be faster than {dense.contender.name} by 1 %"
    chosen = next(one for one in own if one.run_seconds <= 1.01 * fastest.run_seconds)
    return chosen, f"{1 - chosen.run_seconds / dense.run_seconds:.0%} less time a step than {dense.contender.name}"


def way(training: Training, contender: Contender) -> str:
    """How a user trains like this."""
    if contender.method:
        return f"`{contender.flags}`"
    if contender.bits == 32:
        return "train without EDGC"
    if training.loss_scale:  # Megatron's flag has no effect in fp16
        return "train without EDGC, and without Megatron's `--accumulate-allreduce-grads-in-fp32`"
    return "train without EDGC, with Megatron's `--grad-reduce-in-bf16`"


def table(predictions: Sequence[Prediction]) -> list[str]:
    """A row for each link and contender."""
    lines = header(
        ["Gbit/s of a GPU", "contender", "rank", "s a step", "with the warm-up", "against dense fp32", "exposed, s"]
        + ["against dense fp32", "GB of gradients a step"]
    )
    for gbps in dict.fromkeys(one.gbps for one in predictions):
        own = [one for one in predictions if one.gbps == gbps]
        dense = own[0]
        for one in own:
            first = one is dense
            lines.append(
                row(
                    [
                        f"{gbps:g}",
                        one.contender.name,
                        rank_in_words(one.rank) if one.contender.method else "",
                        f"{one.seconds:.2f}",
                        f"{one.run_seconds:.2f}",
                        "" if first else f"{one.run_seconds / dense.run_seconds - 1:+.0%}",
                        f"{one.exposed:.3f}",
                        "" if first or not dense.exposed else f"{one.exposed / dense.exposed - 1:+.0%}",
                        f"{one.gradient_bytes / 1e9:.2f}",
                    ]
                )
            )
    return lines


@dataclass(frozen=True)
class Place:
    """The predictions of one order of ranks on one network. ``in_nodes``: whether reductions leave no node."""

    order: str
    network: str
    predictions: Sequence[Prediction]
    in_nodes: bool = False


def networks(own: Network) -> dict[str, Network]:
    """A cluster's own network, the same with links all alike, and three that are worse."""
    even = replace(own, racks=1, uplink_gbps=None, uplink_seconds=0.0, slow_nodes=0, slow_gbps=None)
    found = {"all links alike": even}
    if even != own:
        found["as in the cluster's file"] = own
    third, quarter = own.gbps / 3, own.gbps * own.gpus_per_node * own.nodes / 2 / 4
    found[f"one node's links at {third:.3g} Gbit/s"] = replace(even, slow_nodes=1, slow_gbps=third)
    if own.nodes % 2 == 0:
        racks = replace(even, racks=2)
        found[f"two racks, uplinks of {quarter:g} Gbit/s"] = replace(racks, uplink_gbps=quarter)
        found["two sites, 10 Gbit/s and 5 ms between them"] = replace(racks, uplink_gbps=10.0, uplink_seconds=5e-3)
    return found


def own_network(own: Network) -> str:
    """Which of ``networks`` is the cluster's own."""
    return next(name for name, network in networks(own).items() if network == own)


def places_table(places: Sequence[Place]) -> list[str]:
    """A row for each order of ranks and network, a column for each contender."""
    contenders = [one.contender.name for one in places[0].predictions]
    lines = header(["order of ranks", "network", "reductions, Gbit/s", *contenders])
    for place in places:
        dense = place.predictions[0]
        cells = [f"{dense.run_seconds:.2f}"]
        for one in place.predictions[1:]:
            which = "" if one.compresses or not one.contender.method else "dense "
            cells.append(f"{which}{one.run_seconds:.2f} ({one.run_seconds / dense.run_seconds - 1:+.0%})")
        lines.append(
            row([place.order, place.network, f"{dense.gbps:.3g}" if dense.gbps < 1000 else f"{dense.gbps:.0f}", *cells])
        )
    return lines


def reading(training: Training, places: Sequence[Place]) -> list[str]:
    """What the table of places says of links that are all alike."""
    alike = [place for place in places if place.network == places[0].network]
    lines = []
    for place in alike:
        chosen, why = recommended(place.predictions)
        lines.append(f"- Order {place.order}, {place.network}: {way(training, chosen.contender)}: {why}.")
        if place.in_nodes:
            lines[-1] += " Reductions do not leave a node."
    ways = [(place.order, one) for place in alike for one in place.predictions]
    order, best = min(ways, key=lambda way: way[1].run_seconds)
    lines.append(
        f"- The least time on them, whatever the loss, is {best.run_seconds:.2f} s. Order {order}: "
        f"{way(training, best.contender)}."
    )
    return lines


def section(training: Training, predictions: Sequence[Prediction], places: Sequence[Place]) -> list[str]:
    """Of one model."""
    experts = ""
    if (own := training.experts) is not None:
        experts = f"EP {own.parallel}, {own.count} experts in each layer of which a token goes to {own.per_token}, "
    changed = f" With `{training.changed}`." if training.changed else ""
    optimizer = ", distributed optimizer" if training.scatters else ""
    overlap = ", reductions overlapped with the backward pass" if training.overlapped else ""
    each_way = training.micro_batches * training.chunks  # of a step
    tensor = ""
    if training.tensor > 1:
        sums = 2 * training.tensor_seconds(training.apart(training.gbps)[0].tensor) * each_way
        tensor = f" and {sums:.2f} s of sums among tensor ranks"
    lines = [
        f"## {training.title}",
        "",
        f"TP {training.tensor}, PP {training.pipeline}, DP {training.replicas}, {experts}"
        f"{training.micro_batches} micro-batches of {training.micro_batch} x {training.sequence} tokens; "
        f"{3 * training.forward_seconds() * each_way:.2f} s of passes{tensor} a step"
        f"{optimizer}{overlap}.{changed}",
        "",
        *table(predictions),
        "",
    ]
    for gbps in dict.fromkeys(one.gbps for one in predictions):
        chosen, why = recommended([one for one in predictions if one.gbps == gbps])
        lines.append(f"- {gbps:g} Gbit/s: {way(training, chosen.contender)}: {why}.")
    rank = max((one.rank or 0 for one in predictions if one.contender.volume is not None), default=0)
    errors, factors = training.error_bytes / 2**30, training.factor_bytes(rank) / 2**30
    of_factors = f" Of it {factors:.1f} GiB are factors at rank {rank}, the largest above." if rank else ""
    twice = " This includes the state of before a step, which a loss scale needs." if training.loss_scale else ""
    lines += [
        "",
        f"Where its processes are on {training.network.nodes} nodes of {training.network.gpus_per_node} GPUs with "
        f"{training.gbps:g} Gbit/s each, in s a step with the warm-up (against dense fp32):",
        "",
        *places_table(places),
        "",
        *reading(training, places),
        "",
        f"For its layers EDGC keeps up to {errors + factors:.1f} GiB on a GPU, {errors / 2 + factors:.1f} GiB with "
        f"`--edgc-error-dtype bf16`.{of_factors}{twice}",
        "",
    ]
    return lines


def page(sections: Sequence[Sequence[str]], name: str, costs: str) -> str:
    """All models, and what was assumed."""
    lines = [
        "# What a step would take on a cluster",
        "",
        "Made by `tools/plan.py`. **Everything here is computed, no step was measured.** A",
        "discrete-event model works through one step: the passes of the pipeline's schedule, messages between stages,",
        "reductions in three units, the optimizer. Assumptions:",
        "",
        f"- Passes reach {REACHED:.0%} of the data sheet's tflop/s in 16 bits. A backward pass takes twice a",
        "  forward pass. Nothing is recomputed, also with --recompute-activations. Weights are gathered after the",
        "  optimizer, also with --overlap-param-gather. Presets with a volume round them where that is clearly",
        "  faster: to 8 bits, `fast` to 4. That is taken to compute as long as the engine of so many bits does.",
        "  Embeddings are left out.",
        "- In each pass a layer has two sums among its tensor ranks, over NVLink where they share a node. Nothing is",
        "  computed meanwhile.",
        "- The step is one of the middle of a run. The column *with the warm-up* has the mean step of the whole run,",
        "  with the warm-up of its flags: 2.5 % of the iterations in 4 or 8 bits, of `fast` 1 %, of PowerSGD 10 % in",
        "  fp32. All comparisons are of that mean. Changes of plan are left out.",
        "- With experts (`--num-experts`) tokens go to them and come back in each layer, in both passes, by an",
        "  all-to-all among the replicas that share them out, and nothing is computed meanwhile. All experts get as",
        "  many tokens. Gradients of experts go round the ring of the processes that hold the same ones, after those",
        "  of the other parameters.",
        f"- What compressing computes, and its messages, are those of [a step, counted]({costs}), between counted",
        "  ranks on a straight line. Beyond the largest counted rank that line goes on, though factorisations then",
        "  take longer. Compressing overlaps with the backward pass and does not slow it down.",
        f"- A message takes {LATENCY * 1e6:g} µs and its bytes over its process's link.",
        "- In the first table of a model every replica and every stage is on another node. No link is shared.",
        "- In the second table processes are where Megatron puts them. By default the replicas of a stage are side",
        "  by side, with `--use-tp-pp-dp-mapping` the stages of a replica. Inside a node a GPU has its data sheet's",
        "  NVLink. All-reduces, reduce-scatters and all-gathers go round rings. A ring is as fast as its slowest",
        "  link, whose speed is in the column *reductions*. Between nodes it uses the links of all of its GPUs that",
        "  share a node. An all-reduce goes twice round its ring, the others once. In the all-to-all with which a sum",
        "  in few bits begins, each GPU sends over its own link. What crosses between racks shares the uplink of its",
        "  rack evenly, and waits for the latency of each crossing.",
        "- A volume gives every matrix the one rank that it pays for. In training EDGC's planner also sends some in",
        "  few bits.",
        "- `paper` is shown at its r_max and at its r_min, a quarter of it, between which entropy sets the rank. r_max",
        "  is the largest rank at which reductions take at most as long as the host's own sum, and at which any",
        "  matrix sends at most half of its bytes. Matrices that would send more travel whole, in fp32. `optimus`",
        "  compresses three quarters of the stages.",
        "- A stage waits idle for some of the gradients that the next stage sends. `paper` and `optimus` send these in",
        "  low rank, with factors in 16 bits. `optimus` has rank 16. `paper` has the rank of its reductions, or a",
        "  smaller one if needed: a message must become half as large, and take no longer between any two stages.",
        "  Compressing such a message takes as long as reducing as many gradients of parameters at that rank. With",
        "  several chunks of a stage `paper` sends these messages whole, and `optimus` needs `--edgc-pp off`.",
        "- `safe`, `balanced` and `fast` round the gradients that a stage sends to the one before, where that makes",
        f"  the message {LEAST_GAIN:g} times faster. For this the stage that sends takes as long as for rounding as",
        "  many gradients of parameters.",
        f"- A volume's reduction takes at most {MAX_TIME_RATIO:.0%} of the time of a dense one. Where it",
        "  cannot, gradients are reduced dense. Where rounding all gradients to 4 bits takes at most as long, and",
        f"  at most {CLEARLY_FASTER:.0%} of the time of low rank, the preset rounds them, as EDGC does in training.",
        "",
        f"The paper reports {PAPER}, without the speed of its links. *Exposed*: seconds after the last backward pass.",
        "",
        f"![Step time against the speed of links]({name}.png)",
        "",
    ]
    for one in sections:
        lines += one
    return "\n".join(lines)


def picture(by_model: Sequence[tuple[Training, Sequence[Prediction]]]) -> bytes:
    """Step time against the speed of links, a panel for each model."""
    figure, places = panels(1, len(by_model), width=4.8, height=3.4)
    for (training, predictions), axes in zip(by_model, places, strict=True):
        for name, color in _LINES.items():
            own = [one for one in predictions if one.contender.name == name]
            style = "--" if name == "dense bf16" else "-"
            axes.plot([p.gbps for p in own], [p.run_seconds for p in own], style, marker="o", color=color, label=name)
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("Gbit/s of a GPU")
        axes.set_ylabel("s a step of the run, computed")
        axes.set_title(training.title)
        tidy(axes)
        axes.legend(fontsize=8)
    return to_png(figure, dpi=90)


def timeline(step: Step) -> bytes:
    """One step: above each stage's line what it computes, below it what its link carries."""
    stages = sorted({span.stage for span in step.spans})
    figure, (axes,) = panels(1, 1, width=10, height=0.8 + 0.5 * len(stages))
    for kind, color in COLORS.items():
        on_link = kind in ("message", "reduce", "gather")
        for stage in stages:
            bars = [(s.start, s.seconds) for s in step.spans if (s.kind, s.stage) == (kind, stage) and s.seconds]
            axes.broken_barh(
                bars, (-stage - (0.45 if on_link else 0), 0.4), facecolors=[color], edgecolor="white", lw=0.3
            )
        if any(span.kind == kind for span in step.spans):
            axes.broken_barh([], (0, 0), facecolors=[color], label=kind)
    axes.set_yticks([-float(stage) for stage in stages], [f"stage {stage + 1}" for stage in stages])
    axes.set_xlabel("s")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=len(COLORS), fontsize=8, frameon=False)
    tidy(axes)
    return to_png(figure, dpi=90)
