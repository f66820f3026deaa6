"""Compute, before anything is rented, how long a step takes with and without EDGC.

    python tools/plan.py gpt2_12.1b [MORE ...] [--cluster h100_64] [--gbps 10 25 50 100 200 400]
        [--output docs/network/clusters] [--write-flags FILE] [flags of pretrain_gpt.py]
    python tools/plan.py --validate docs/network/points.json [--output docs/network/predicted]

Prints a table of step times, exposed communication and bytes for links of each speed, and what to train with. With
--output it writes OUTPUT.md, OUTPUT.json, OUTPUT.png, and OUTPUT_step.png, the timeline of a step of the first model
with what is recommended on its own cluster's link. --write-flags writes the recommended flags as a line, for
``bash scripts/pretrain_gpt2_12b_edgc.sh $(cat FILE)``. MODEL and --cluster may be files of your own: copy those in
configs/. Of a model other than the paper's, and with other flags, a step of one stage is counted first. Options that it
cannot compute are refused, such as --context-parallel-size. --validate compares the planner with measured steps.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import _root  # noqa: F401

from edgc.comm.collectives import all_reduce_bytes
from edgc.specs import MatrixSpec
from tools._root import REPOSITORY
from tools.benchmarks.stage import Stage
from tools.benchmarks.step_costs import ROUNDED, gradient_bytes, ways_in_units
from tools.launching.configs import LaunchError
from tools.planning import page, validation
from tools.planning.compressing import Compressing
from tools.planning.contenders import CONTENDERS
from tools.planning.flags import check_names
from tools.planning.placement import StageLinks
from tools.planning.prediction import Prediction, predict
from tools.planning.training import LATENCY, REACHED, Training
from tools.shared.command import command_parser, say_error
from tools.shared.files import with_ending, write, write_json

METHODS = ("paper", "balanced", *ROUNDED)
COSTS = REPOSITORY / "docs" / "bench" / "steps.json"
GBPS = (10.0, 25.0, 50.0, 100.0, 200.0, 400.0)


# How Megatron counts the processes, and whether stages come before replicas.
ORDERS = {"Megatron's": "", "`--use-tp-pp-dp-mapping`": "--use-tp-pp-dp-mapping"}  # of ranks, with the flag for it


def predict_all(
    training: Training, compressing: Mapping[str, Compressing], links: Sequence[StageLinks]
) -> list[Prediction]:
    """A step of each contender that the model can have."""
    able = [one for one in CONTENDERS if training.pipeline > 1 or not one.fuses]
    return [predict(training, one, compressing, links) for one in able]


def reduced(training: Training) -> list[Stage]:
    """What one GPU reduces: its layers, then its experts where another GPU holds the same."""

    def stage(shapes: Mapping[str, tuple[int, int]], replicas: int) -> Stage:
        here = range(training.layers // training.pipeline)
        matrices = [MatrixSpec(f"{place}.{name}", *shape) for place in here for name, shape in shapes.items()]
        return Stage(training.title, tuple(matrices), replicas, training.layer.linear_bias, training.layer.norm_bias)

    shapes, experts = training.layer.matrices(training.tensor), training.experts
    if experts is None:
        return [stage(shapes, training.replicas)]
    found = [stage({name: shapes[name] for name in ("qkv", "proj")}, training.replicas)]
    if training.expert_replicas > 1:
        one = replace(training.layer, inside=experts.width).matrices(training.tensor)
        each = range(experts.count // experts.parallel)
        of_all = {f"expert{number}.{name}": one[name] for number in each for name in ("fc1", "fc2")}
        found.append(stage(of_all, training.expert_replicas))
    return found


def costs_of(training: Training, costs: Path | None) -> dict[str, Compressing]:
    """What each method takes to compress; counted now where neither ``costs`` nor, without it, COSTS has it.

    Raises ``LaunchError`` where ``costs`` lacks it.
    """
    layers, *experts = reduced(training)
    size = gradient_bytes(layers)
    kept = {method: Compressing.read(costs or COSTS, training.title, size, method, training.gpu) for method in METHODS}
    if training.experts is not None or None in kept.values():
        what = f"a step of {training.title} with these flags on {training.gpu.name}"
        if costs is not None:
            raise LaunchError(f"{costs}: lacks {what}; without --costs it is counted")
        print(f"plan: counting {what}, a minute or more", file=sys.stderr, flush=True)
        rows = [asdict(one) for one in ways_in_units(layers, training.gpu, training.gbps)]
        kept = {method: Compressing.of(rows, method) for method in METHODS}
    found = {method: one for method, one in kept.items() if one is not None}
    for stage in experts:
        ring = all_reduce_bytes(1.0, stage.data_parallel) / all_reduce_bytes(1.0, layers.data_parallel)
        rows = [asdict(one) for one in ways_in_units(stage, training.gpu, training.gbps)]
        for method, one in found.items():
            if (own := Compressing.of(rows, method)) is not None:
                found[method] = one.with_experts(own, ring)
    return found


def main(argv: list[str] | None = None) -> int:
    """Print, and write what is asked for; returns the exit status."""
    parser = command_parser(__doc__, passes_on=True)
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="file, or a name in configs/models/; comes first",
    )
    parser.add_argument("--cluster", help="name in configs/clusters/, or a file (default: that of the model)")
    parser.add_argument("--gbps", type=_rate, nargs="+", help="Gbit/s of a GPU's link (default: 10 to 400)")
    parser.add_argument(
        "--costs",
        type=Path,
        help="what compressing takes, of tools/count_step.py (default: docs/bench/steps.json, "
        "and what that lacks is counted)",
    )
    parser.add_argument("--output", type=Path, help="of the page and its pictures, without ending")
    parser.add_argument(
        "--write-flags", type=Path, metavar="FILE", help="of the first model at --gbps, or on its cluster's link"
    )
    parser.add_argument("--validate", type=Path, metavar="POINTS", help="points.json of tools/bench_network.py")
    options, extra = parser.parse_known_args(argv)
    try:
        _make_folders(options.output, options.write_flags)  # before what takes a minute
    except LaunchError as error:
        say_error("plan", error)
        return 2
    if options.validate is not None:
        beside = {"MODEL": options.models, "--write-flags": options.write_flags, "--gbps": options.gbps}
        beside |= {"--cluster": options.cluster, "--costs": options.costs, "flags of Megatron": extra}
        if unused := [name for name, given in beside.items() if given]:
            say_error("plan", LaunchError(f"--validate takes --output alone beside it, not {', '.join(unused)}"))
            return 2
        return validate(options.validate, options.output)
    if not options.models:
        say_error("plan", LaunchError("name a model of configs/models/"))
        return 2
    if options.write_flags is not None and len(options.gbps or []) > 1:
        say_error("plan", LaunchError("--write-flags needs one rate: give --gbps one value, or leave it out"))
        return 2
    found: list[tuple[Training, list[Prediction], list[page.Place]]] = []
    try:
        check_names(extra)
        for name in options.models:
            training = Training.of(name, options.cluster, extra)
            compressing = costs_of(training, options.costs)
            speeds = sorted({*(options.gbps or GBPS), training.gbps})
            apart = [one for gbps in speeds for one in predict_all(training, compressing, training.apart(gbps))]
            places = [
                page.Place(
                    order,
                    name,
                    predict_all(training, compressing, training.placed(network, stages_first=bool(flag))),
                    training.placement(stages_first=bool(flag)).rings_stay_in_nodes(network),
                )
                for order, flag in ORDERS.items()
                for name, network in page.networks(training.network).items()
            ]
            found.append((training, apart, places))
    except LaunchError as error:
        say_error("plan", error)
        return 2
    sections = [page.section(*one) for one in found]
    print("\n".join(line for section in sections for line in section))
    for one, _, _ in found:
        print(
            f"{one.title}: assumes {one.network.inside:g} Gbit/s of a GPU to others in its node (inside_gbps of the "
            f"cluster file), {REACHED:.0%} of the peak of {one.gpu.name} and {1e6 * LATENCY:.0f} us of "
            "latency; the page of --output lists all assumptions"
        )
    training, predictions, places = found[0]
    try:
        if options.output is not None:
            written(options.output, found, sections)
        if options.write_flags is not None:
            if options.gbps:
                flags = flags_of(training, _chosen(predictions, options.gbps[0]))
            else:
                flags = flags_on_cluster(training, places)
            write(options.write_flags, f"{flags}\n".encode())
    except ModuleNotFoundError as error:
        say_error("plan", _needs(error))
        return 2
    except OSError as error:
        say_error("plan", _unwritten(error))
        return 2
    except LaunchError as error:
        say_error("plan", error)
        return 2
    return 0


def _unwritten(error: OSError) -> LaunchError:
    return LaunchError(f"{error.filename}: {error.strerror}")


def _make_folders(output: Path | None, flags: Path | None) -> None:
    """Raises ``LaunchError`` for what nothing can be written to."""
    if output is not None and not output.name:
        raise LaunchError(f"--output {output}: needs a name")
    if flags is not None and (flags.is_dir() or not flags.name):
        raise LaunchError(f"--write-flags {flags}: must be a file")
    try:
        for file in filter(None, (output, flags)):
            file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritten(error) from error


def flags_on_cluster(training: Training, places: Sequence[page.Place]) -> str:
    """Those of the order of ranks and the contender with the shortest step on the cluster's own links."""
    own = [place for place in places if place.network == page.own_network(training.network)]
    chosen = {place.order: page.recommended(place.predictions)[0] for place in own}
    order = min(chosen, key=lambda order: chosen[order].run_seconds)
    return " ".join(filter(None, [flags_of(training, chosen[order]), ORDERS[order]]))


def _chosen(predictions: Sequence[Prediction], gbps: float) -> Prediction:
    return page.recommended([one for one in predictions if one.gbps == gbps])[0]


def flags_of(training: Training, chosen: Prediction) -> str:
    """Those of a run with ``--edgc`` that trains so. Raises ``LaunchError`` where there are none."""
    if chosen.contender.bits == 16 and training.loss_scale:
        raise LaunchError(f"--write-flags: no flags can do this: {page.way(training, chosen.contender)}")
    return chosen.contender.flags


def _rate(text: str) -> float:
    rate = float(text)
    if not 0 < rate < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0")
    return rate


def written(
    output: Path,
    found: list[tuple[Training, list[Prediction], list[page.Place]]],
    sections: list[list[str]],
) -> None:
    """The page, its raw figures and its pictures. One shows a step of the first model with ``page.DRAWN``."""
    training, predictions, _ = found[0]
    drawn = next(one for one in predictions if (one.gbps, one.contender.name) == (training.gbps, page.DRAWN))
    costs = "../bench/steps.md"
    text = page.page(sections, output.name, costs)
    step = f"{output.name}_step.png"
    title = f"{training.title}, {drawn.gbps:g} Gbit/s, {drawn.contender.name}"
    text += f"\n## One step\n\n{title}. Above: what a stage computes; below: what its link carries.\n\n"
    text += f"![Timeline]({step})\n"
    write(with_ending(output, ".md"), text.encode())
    write(with_ending(output, ".png"), page.picture([(training, predictions) for training, predictions, _ in found]))
    write(output.with_name(step), page.timeline(drawn.step))
    rows = [_raw(training, one) for training, predictions, _ in found for one in predictions]
    placed = [
        {"order": place.order, "network": place.network, **_raw(training, one)}
        for training, _, places in found
        for place in places
        for one in place.predictions
    ]
    trainings = [asdict(one) for one, _, _ in found]
    write_json(with_ending(output, ".json"), {"training": trainings, "rows": rows, "placed": placed}, indent=1)
    print(f"written: {output}.md, {output}.json, {output}.png, {output.with_name(step)}")


def _raw(training: Training, one: Prediction) -> dict[str, Any]:
    return {
        "model": training.title,
        "gbps": one.gbps,
        "contender": one.contender.name,
        "rank": one.rank,
        "compresses": one.compresses,
        "step_seconds": one.seconds,
        "run_step_seconds": one.run_seconds,
        "exposed_seconds": one.exposed,
        "gradient_bytes": one.gradient_bytes,
    }


def validate(points: Path, output: Path | None) -> int:
    """Compare the model with measured points."""
    try:
        checked = validation.check(json.loads(points.read_text())["points"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        say_error("plan", LaunchError(f"{points}: has no points of tools/bench_network.py: {error}"))
        return 2
    if not checked:
        say_error("plan", LaunchError(f"{points}: no point that the model was not fitted to"))
        return 2
    name = "predicted" if output is None else output.name
    text = validation.page(checked, points.name, name)
    print(text)
    if output is not None:
        try:
            picture = validation.picture(checked)
        except ModuleNotFoundError as error:
            say_error("plan", _needs(error))
            return 2
        write(with_ending(output, ".md"), text.encode())
        write(with_ending(output, ".png"), picture)
        write_json(with_ending(output, ".json"), [{**asdict(one), "error": one.error} for one in checked], indent=1)
    return 0


def _needs(error: ModuleNotFoundError) -> LaunchError:
    return LaunchError(f"pictures need {error.name}: install EDGC with its extra 'report'")


if __name__ == "__main__":
    sys.exit(main())
