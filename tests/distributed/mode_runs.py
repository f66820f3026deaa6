"""Runs many small trainings one after another on the same ranks, and checks each reduction of them from inside.

    python -m torch.distributed.run --standalone --nproc-per-node 4 tests/distributed/mode_runs.py RUNS.json FOLDER

RUNS.json holds a list of {"name": ..., "arguments": [...]}, perhaps with "full_rank": true, with "latest": [folder,
iteration] to go on from an earlier checkpoint than the last, with "slow_stage": the pipeline stage whose messages are
late, with "break_even": the largest rank at which messages take no longer, with "message_seconds" or "gather_seconds":
how long rounded messages, or weights, take where others take 1 s, or with "unit_bytes": of gradients that are worth a
reduction of their own. Rank r leaves FOLDER/NAME-r.pt with its parameters, losses and what ``Watch`` found. A run that
fails leaves its traceback instead.
"""

import gc
import hashlib
import inspect
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import all_reduce as own_all_reduce  # of the checks, not counted

from megatron.edgc.recipes import cpu

cpu.redirect()

import megatron.training.training as megatron_training  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import param_and_grad_buffer  # noqa: E402
from megatron.core.utils import unwrap_model  # noqa: E402

import edgc.plan.allocation  # noqa: E402
import edgc.plan.selection  # noqa: E402
import megatron.edgc.messages.plan  # noqa: E402
import megatron.edgc.session  # noqa: E402
import megatron.edgc.stages  # noqa: E402
from edgc.byte_counts import RunBytes  # noqa: E402
from edgc.comm.collectives import Exchange  # noqa: E402
from edgc.compress import lowrank, spikes  # noqa: E402
from edgc.compress.message_sender import MessageFormat, MessageSender  # noqa: E402
from edgc.compress.reducer import GradientReducer  # noqa: E402
from edgc.plan.times.comm_cost import LinearCost, StageCost  # noqa: E402
from edgc.plan.times.gather_times import GatherTimes  # noqa: E402
from megatron.edgc.messages.costs import message_shape  # noqa: E402
from megatron.edgc.messages.pipeline_messages import PipelineMessages  # noqa: E402
from megatron.edgc.recipes.pretrain import train  # noqa: E402
from megatron.edgc.run import value_bytes  # noqa: E402

# what gradients are summed with, by whomever; Megatron has a name of its own for the last one
COLLECTIVES: tuple[tuple[Any, str], ...] = (
    *((dist, name) for name in ("all_reduce", "all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor")),
    (param_and_grad_buffer, "dist_reduce_scatter_func"),
)


class Watch:
    """What went wrong in the reductions of a run, by the rules of docs/algorithm.md."""

    def __init__(self) -> None:
        self.reductions = 0
        self.lost = 0.0  # of what was put in, relative to its largest entry
        self.lost_messages = 0.0  # the same of messages between stages
        self.training = False  # before, messages are timed
        self.message_ranks: list[int | None] = []  # of those that this rank has sent in training
        # of gradients for the stage before: the chunks whose backward passes made them, and those they were taken for
        self.chunks: tuple[list[int], list[int]] = ([], [])
        self.apart: list[str] = []  # state that differs within a data-parallel group
        self.finalizing = False
        self.finalize_bytes = 0.0  # that this process has sent for gradients after its backward passes, by whomever

    def around(self, reduce: Any) -> Any:
        def watched(
            reducer: GradientReducer,
            gradients: Mapping[str, Tensor],
            iteration: int,
            loss_scale: Tensor | None = None,
            shards: Mapping[str, Sequence[int]] | None = None,
        ) -> Exchange[None]:
            scale = 1.0 if loss_scale is None else float(loss_scale)
            excess = _excess(reducer, gradients, loss_scale)
            put_in = {name: gradient.double() / scale for name, gradient in gradients.items()}
            owed, waiting = _summed(reducer, put_in), _waiting(reducer, put_in, iteration)
            yield from reduce(reducer, gradients, iteration, loss_scale, shards)
            self.reductions += 1
            nothing = {name: torch.zeros_like(gradient) for name, gradient in put_in.items()}
            left = _summed(reducer, nothing, waiting, excess)
            for name, own in gradients.items():
                gradient = own if shards is None else _gathered(reducer, own, shards[name])
                if bool(torch.isfinite(gradient).all()):
                    lost = owed[name] - gradient.double() / scale - left[name]
                    # a copy of a tied embedding may have no gradient at all: then nothing must be lost
                    self.lost = _worse(self.lost, lost.abs().max() / owed[name].abs().max().clamp_min(1e-300))
            self._compare(reducer)

        return watched

    def around_messages(self, encode: Any, slow_stage: int | None) -> Any:
        """Of each sender that feeds back: over its messages, what was put in is what arrived and what is left."""

        def watched(
            sender: MessageSender, matrix: Tensor, form: MessageFormat, header: Tensor, scale: Tensor | None = None
        ) -> Tensor:
            if self.training:
                self.message_ranks.append(form.used_rank)
            if parallel_state.get_pipeline_model_parallel_rank() == slow_stage:
                time.sleep(0.05)
            own = 1.0 if scale is None else float(scale)
            spike = 1.0
            if sender.feedback and not (form.used_rank is None and sender.error is None):
                norm = torch.linalg.vector_norm(matrix.float()) / own
                before = torch.zeros(()) if sender.norm is None else sender.norm
                spike = float(spikes.excess(norm, before, sender.spike_limit))
            owed = matrix.double() / own + (0.0 if sender.error is None else sender.error.double())
            message: Tensor = encode(sender, matrix, form, header, scale)
            if sender.feedback and bool(torch.isfinite(matrix).all()):
                left = 0.0 if sender.error is None else sender.error.double() * spike  # of a spike less is kept
                lost = owed - form.decode(message).double() / own - left
                self.lost_messages = _worse(self.lost_messages, lost.abs().max() / owed.abs().max())
            return message

        return watched

    def around_chunk(self, chunk: Any) -> Any:
        """Of the messages' ``_chunk``: what it says of gradients."""

        def watched(messages: PipelineMessages, direction: str, place: int) -> int:
            self.training = True
            found: int = chunk(messages, direction, place)
            if direction == "backward":
                self.chunks[1].append(found)
            return found

        return watched

    def note_chunk(self, place: int, model: Any) -> None:
        """Note when this chunk has the gradient of its input."""
        own = model.set_input_tensor

        def set_input_tensor(given: Any) -> None:
            tensor = given[0] if isinstance(given, list) else given
            if tensor is not None and tensor.requires_grad:
                tensor.register_hook(lambda gradient: self.chunks[0].append(place))
            own(given)

        model.set_input_tensor = set_input_tensor

    def around_collective(self, collective: Any) -> Any:
        """Of those within Megatron's ``finalize_model_grads``: what this process sends, as collectives.py counts."""

        def watched(*tensors: Tensor, **options: Any) -> Any:
            if self.finalizing:
                ranks, sent = dist.get_world_size(options.get("group")), tensors[-1].nbytes
                share = {"all_reduce": 2 / ranks, "all_gather_into_tensor": 1}.get(collective.__name__, 1 / ranks)
                self.finalize_bytes += sent * (ranks - 1) * share
            return collective(*tensors, **options)

        return watched

    def around_finalize(self, finalize: Any) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.finalizing = True
            result = finalize(*args, **kwargs)
            self.finalizing = False
            return result

        return watched

    def _compare(self, reducer: GradientReducer) -> None:
        state = reducer.state.state_dict()
        shared = {
            f"{part}:{key}": value.message for part in ("engine", "equaliser") for key, value in state[part].items()
        }
        digest = {name: hashlib.sha256(message.numpy().tobytes()).hexdigest() for name, message in shared.items()}
        everyone: list[Any] = [None] * reducer.communicator.world_size
        dist.all_gather_object(everyone, (digest, reducer.router.ranks), group=reducer.communicator.group)
        if any(other != everyone[0] for other in everyone):
            self.apart.append(f"{dist.get_rank()}: {sorted(shared)[:3]}")


def _worse(worst: float, now: Tensor) -> float:
    return max(worst, math.inf if math.isnan(now) else float(now))


def _gathered(reducer: GradientReducer, gradient: Tensor, cuts: Sequence[int]) -> Tensor:
    """The sum of which each rank is only sure of its own part."""
    start, stop = cuts[reducer.communicator.process : reducer.communicator.process + 2]
    whole = torch.zeros_like(gradient)
    whole.view(-1)[start:stop] = gradient.reshape(-1)[start:stop]
    own_all_reduce(whole, group=reducer.communicator.group)
    return whole


def _excess(reducer: GradientReducer, gradients: Mapping[str, Tensor], loss_scale: Tensor | None) -> dict[str, float]:
    """What the reducer is to divide errors by: 1, and of a spike more."""
    fed_back = {
        name: gradient.view(reducer.router.specs[name].rows, -1).float()
        for name, gradient in gradients.items()
        if gradient.numel() and (name in reducer.router.ranks or not reducer.router.elementwise(name).exact)
    }
    if not fed_back:
        return {}
    return {name: float(one) for name, one in reducer.state.norms.spikes(fed_back, loss_scale).by_name().items()}


def _waiting(reducer: GradientReducer, gradients: Mapping[str, Tensor], iteration: int) -> dict[str, Tensor]:
    """The part of each error that the next reduction does not send, in float64."""
    share = 1 - reducer.error_gain(iteration)
    packed = reducer.state.feedback.packed
    return {
        name: share * packed[name].values().view_as(gradient).double()
        for name, gradient in gradients.items()
        if name in packed and (name in reducer.router.ranks or not reducer.router.elementwise(name).exact)
    }


def _summed(
    reducer: GradientReducer,
    put_in: Mapping[str, Tensor],
    waiting: Mapping[str, Tensor] | None = None,
    excess: Mapping[str, float] | None = None,
) -> dict[str, Tensor]:
    """Over the group, in float64: what was put in and the errors kept now.

    ``excess``: what they were divided by, but for what was ``waiting`` before.
    """
    total = {}
    for name, tensor in put_in.items():
        kept = reducer.state.feedback.packed.get(name)
        part = tensor.double()
        if kept is not None:
            older = (waiting or {}).get(name, torch.zeros_like(part))
            part = part + older + (kept.values().view_as(tensor).double() - older) * (excess or {}).get(name, 1.0)
        own_all_reduce(part, group=reducer.communicator.group)
        total[name] = part
    return total


def watch_and_change(case: dict[str, Any], watch: Watch, patch: pytest.MonkeyPatch) -> None:
    """For one training: note what EDGC and Megatron do, and set what the case asks for."""
    training, message_plan = megatron.edgc.session, megatron.edgc.messages.plan
    for collective in COLLECTIVES:
        patch.setattr(*collective, watch.around_collective(getattr(*collective)))
    patch.setattr(training, "finalize_model_grads", watch.around_finalize(training.finalize_model_grads))
    patch.setattr(PipelineMessages, "_chunk", watch.around_chunk(PipelineMessages._chunk))
    patch.setattr(MessageSender, "encode", watch.around_messages(MessageSender.encode, case.get("slow_stage")))
    patch.setattr(GradientReducer, "reduce", watch.around(GradientReducer.reduce))
    if "message_seconds" in case:
        cost = StageCost(LinearCost(case["message_seconds"], 0.0), 1.0, 1.0)
        patch.setattr(training, "message_costs", lambda *args: {1: cost})
    if "gather_seconds" in case:
        times = GatherTimes(1.0, case["gather_seconds"])
        patch.setattr(megatron.edgc.stages, "gather_times", lambda *args: times)
    if "break_even" in case:
        patch.setattr(StageCost, "largest_rank", lambda cost, seconds: case["break_even"])
    if "unit_bytes" in case:
        patch.setattr(megatron.edgc.stages, "MIN_UNIT_BYTES", case["unit_bytes"])
    if case.get("full_rank"):
        for module in (edgc.plan.selection, edgc.plan.allocation):
            patch.setattr(module, "pays", lambda *args: True)
        patch.setattr(message_plan, "largest_message_rank", lambda config, args, saving: min(message_shape(args)))
        used_rank = property(lambda form: form.rank and lowrank.limited(form.rank, form.rows, form.cols))
        patch.setattr(MessageFormat, "used_rank", used_rank)


def run(case: dict[str, Any]) -> dict[str, Any]:
    """One training; what it leaves on this rank."""
    watch, chunks, initial = Watch(), [], {}

    def capture(built: list[torch.nn.Module]) -> list[torch.nn.Module]:
        chunks.extend(built)
        for place, chunk in enumerate(built):
            watch.note_chunk(place, unwrap_model(chunk))
        initial.update(parameters())
        return built

    def parameters() -> dict[str, Tensor]:
        return {
            f"{place}.{name}": parameter.detach().clone()
            for place, chunk in enumerate(chunks)
            for name, parameter in unwrap_model(chunk).named_parameters()
        }

    if "latest" in case and dist.get_rank() == 0:
        folder, iteration = case["latest"]
        tracker = Path(folder, "latest_checkpointed_iteration.txt")
        if tracker.exists():  # else every rank will fail alike
            tracker.write_text(str(iteration))
    with pytest.MonkeyPatch.context() as patch:
        watch_and_change(case, watch, patch)
        patch.setattr(sys, "argv", ["pretrain_gpt.py", *case["arguments"]])
        session = train(True, [capture])
    stages = [] if session is None else session.stages
    for reducer in (one for stage in stages for one in stage.reducers):
        assert reducer.whole_error_iterations == reducer.router.config.whole_error_iterations(session.args.train_iters)
    counts = sum((stage.byte_counts() for stage in stages), RunBytes())
    if session is not None and session.messages is not None:
        counts += RunBytes(messages=session.messages.byte_count())
    result = {
        "place": [
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_rank(),
        ],
        # alike on all ranks of a pipeline stage
        "replicated": [
            f"{place}.{name}"
            for place, chunk in enumerate(chunks)
            for name, parameter in unwrap_model(chunk).named_parameters()
            if not getattr(parameter, "tensor_model_parallel", False) and getattr(parameter, "allreduce", True)
        ],
        "initial": initial,
        "parameters": parameters(),
        "owed": {
            name: total
            for stage in stages
            for reducer in stage.reducers
            for name, total in _summed(
                reducer, {name: torch.zeros(spec.rows, spec.cols) for name, spec in reducer.router.specs.items()}
            ).items()
        },
        "reductions": watch.reductions,
        "lost": watch.lost,
        "lost_messages": watch.lost_messages,
        "message_ranks": watch.message_ranks,
        "chunks": watch.chunks,
        "apart": watch.apart,
        "finalize_bytes": watch.finalize_bytes,
        "stages": [] if session is None else [str(key) for key in session.keys],
        "elements": sum(parameter.numel() for parameter in parameters().values()),
        "state_bytes": sum(reducer.state.bytes() for stage in stages for reducer in stage.reducers),
        "param_wire": "off" if session is None else session.stages[0].param_wire,
        "gradient_bytes": 4 if session is None else value_bytes(session.args),
        "bytes": [
            size for count in (counts.gradients, counts.weights, counts.messages) for size in (count.sent, count.host)
        ],
    }
    for chunk in chunks:
        vars(chunk).clear()  # its autograd hooks refer to it, where the garbage collector does not see
    return result


def functions() -> dict[str, Any]:
    """Every function and class by the names under which Megatron's modules know it."""
    return {
        f"{name}.{attribute}": value
        for name, module in list(sys.modules.items())
        if name.startswith(("megatron.core", "megatron.training"))
        for attribute, value in vars(module).items()
        if inspect.isroutine(value) or inspect.isclass(value)
    }


def alike(case: int, failed: bool) -> bool:
    """Whether all ranks have failed in this case, or none. A rank that waits in a collective answers when that ends."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.set(f"mode_runs {case} {os.environ['RANK']}", str(failed))
    answers = {store.get(f"mode_runs {case} {rank}") for rank in range(int(os.environ["WORLD_SIZE"]))}
    return len(answers) == 1


def main() -> None:
    cases, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    # Each case would spend a fifth of its time on these: Megatron reads its own sources twice for the help of its
    # arguments, and the garbage collector looks at every object of the imports.
    inspect.getsource = cache(inspect.getsource)
    gc.freeze()
    # A process that Megatron's first checkpoint spawns would import all of this again.
    del vars(sys.modules["__main__"])["__file__"]
    before = functions()
    for place, case in enumerate(cases):
        try:
            result = run(case)
        except BaseException:  # also SystemExit of the argument parser
            result = {"failed": traceback.format_exc()}
            print(f"{case['name']}: {result['failed']}", file=sys.stderr, flush=True)
        # Megatron replaces one itself
        changed = {name: value for name, value in functions().items() if before.get(name, value) is not value}
        result["replaced"] = [name for name, value in changed.items() if "edgc" in value.__module__]
        torch.save(result, folder / f"{case['name']}-{dist.get_rank() if dist.is_initialized() else 0}.pt")
        megatron_training.destroy_global_state()
        if not alike(place, "failed" in result):
            os._exit(1)  # the others wait for this rank, or this one for them, in collectives of the training
        # Megatron forgets its groups without closing them; the threads of hundreds would fill the machine.
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        del group
        gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
