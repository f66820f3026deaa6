"""What travels between pipeline stages: the state of this process's messages, counted, measured, compressed."""

import math
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.pipeline_parallel import schedules
from torch import Tensor

from edgc.arithmetic import own_arithmetic
from edgc.byte_counts import ByteCount
from edgc.compress.message_sender import HEADER_BYTES, MessageFormat, MessageSender, UnexpectedMessage, described_header
from edgc.config import EDGCConfig
from edgc.hosts.steps import Step
from edgc.observe.averages import mean_of_finite
from edgc.observe.entropy import ESTIMATORS
from edgc.observe.sampler import GradientSampler
from edgc.observe.window import Boundary, Direction, MessageWindow
from edgc.specs import MatrixSpec
from megatron.edgc.messages.costs import message_shape, message_wire


class PipelineMessages:
    """What this process sends to its neighbours in the pipeline, and what it has to expect of them.

    Gradients go back from each stage to the one before, activations forward. In training both are counted; those of
    ``config.pipeline.messages`` travel as ``MessageFormat`` says, with a header. Evaluation is left alone.

    Args:
        step: the step under way, with the rank of each of ``boundaries``.
        repeatable: whether a step may be run again or rolled back; its senders' state before it is kept for that.
    """

    def __init__(
        self,
        config: EDGCConfig,
        args: Namespace,
        chunks: Sequence[DistributedDataParallel],
        step: Callable[[], Step],
        repeatable: bool,
    ):
        self.config, self.args, self.chunks = config, args, chunks
        self.step, self.repeatable = step, repeatable
        self.stage: int = parallel_state.get_pipeline_model_parallel_rank()
        self.stages: int = parallel_state.get_pipeline_model_parallel_world_size()
        self.directions: tuple[Direction, ...] = {
            "off": (),
            "both": ("backward", "forward"),
        }.get(config.pipeline.messages.which, ("backward",))  # type: ignore[assignment]
        ring = len(chunks) > 1  # then the last stage's chunks are followed by the first stage's next ones
        self.boundaries = [
            Boundary(direction, sender, receiver)
            for direction in self.directions
            for sender in range(self.stages)
            for receiver in [_neighbour(sender, direction, self.stages, ring)]
            if receiver is not None
        ]
        self.senders: dict[tuple[Direction, int], MessageSender] = {}  # by direction and chunk
        self.bytes: dict[Direction, ByteCount] = {"forward": ByteCount(), "backward": ByteCount()}  # so far
        self.sampler = GradientSampler.of(config)
        self.entropy: dict[Direction, list[float | Tensor]] = {"forward": [], "backward": []}
        self._window_start = self.bytes.copy()
        self._iteration: int | None = None
        self._wrong: Tensor | None = None
        self._messages: Counter[tuple[str, Direction]] = Counter()  # sent and received in this step
        self._orders: dict[tuple[Direction, int], list[int]] = {}  # by direction and number of micro-batches
        self._before: dict[tuple[Direction, int], dict[str, Tensor | None]] = {}
        self._entropy_before: dict[Direction, list[float | Tensor]] = {}  # before the step under way
        self._repeated = False

    def begin(self) -> None:
        """A step begins, or is run again."""
        iteration = self.step().iteration
        if self.repeatable:
            self.roll_back(iteration)
            self._before = {key: sender.state_dict() for key, sender in self.senders.items()}
        self._repeated = iteration == self._iteration
        if not self._repeated:
            self._entropy_before = {direction: list(seen) for direction, seen in self.entropy.items()}
        self._iteration = iteration
        self._messages.clear()

    def began(self, iteration: int) -> bool:
        """Whether this step's messages pass through here."""
        return iteration == self._iteration

    @property
    def training(self) -> bool:
        """Whether messages are of a training step: not where a loop looks at the loss of a model in training mode."""
        return bool(self.chunks[0].training) and torch.is_grad_enabled()

    def specs(self) -> list[list[MatrixSpec]]:
        """The matrix of each boundary, for the controller."""
        return [[MatrixSpec(boundary.id, *message_shape(self.args))] for boundary in self.boundaries]

    def outgoing(self, direction: Direction, tensor: Tensor) -> Tensor:
        """What travels in the place of a (tokens, micro-batch, width) tensor."""
        index = self._count("sent", direction)
        if direction not in self.directions:
            self.bytes[direction] += ByteCount(tensor.nbytes, tensor.nbytes, tensor.nbytes)
            return tensor
        step = self.step()
        matrix = tensor.detach().reshape(-1, tensor.shape[-1])
        if self.sampler.measures(step.iteration) and not self._repeated:  # a step is measured once
            self._measure(direction, matrix, step)
        form = self._format(direction, self.stage, index, tensor.shape, tensor.dtype)
        chunk = self._chunk(direction, index)
        scale = step.loss_scale if direction == "backward" else None
        header = form.header(step.iteration, self.stage, direction == "forward", index)
        with own_arithmetic(matrix.device):
            message = self._sender(direction, chunk).encode(matrix, form, header, scale)
        self.bytes[direction] += ByteCount(message.nbytes, tensor.nbytes, tensor.nbytes)
        return message

    def incoming(self, direction: Direction, shape: Sequence[int], dtype: torch.dtype, device: Any) -> "Incoming":
        """What has to be received in the place of such a tensor."""
        tensor = torch.empty(tuple(shape), requires_grad=True, device=device, dtype=dtype)
        if direction not in self.directions:
            return Incoming(tensor, tensor)
        sender = (self.stage + (1 if direction == "backward" else -1)) % self.stages
        index = self._count("received", direction)
        form = self._format(direction, sender, index, shape, dtype)
        size = form.bytes
        if not tensor.is_cuda:  # gloo ends the process of a message that is too long; a shorter one it lets pass
            size = max(size, HEADER_BYTES + form.dense_bytes)
        elif self._wrong is None:
            self._wrong = torch.zeros((), dtype=torch.bool, device=device)
        return Incoming(
            tensor,
            torch.zeros(size, dtype=torch.uint8, device=device),
            form,
            form.header(self.step().iteration, sender, direction == "forward", index),
            str(Boundary(direction, sender, self.stage)),
            self._wrong,
        )

    def _sender(self, direction: Direction, chunk: int) -> MessageSender:
        if (direction, chunk) not in self.senders:
            seed = self.config.seed, direction, self.stage, chunk
            self.senders[direction, chunk] = MessageSender(
                direction == "backward", *seed, spike_limit=self.config.study.spike_limit
            )
        return self.senders[direction, chunk]

    def _format(
        self, direction: Direction, sender: int, index: int, shape: Sequence[int], dtype: torch.dtype
    ) -> MessageFormat:
        (boundary,) = (
            index for index, one in enumerate(self.boundaries) if (one.direction, one.sender) == (direction, sender)
        )
        rank = self.step().message_ranks[boundary]
        if self.config.pipeline.messages.epilogue and index < get_num_microbatches() - (self.stages - sender):
            rank = None  # its receiver still has forward passes to do
        return MessageFormat(math.prod(shape[:-1]), shape[-1], rank, message_wire(self.config, dtype), dtype)

    def _count(self, what: str, direction: Direction) -> int:
        index = self._messages[what, direction]
        self._messages[what, direction] += 1
        return index

    def _chunk(self, direction: Direction, index: int) -> int:
        """The model chunk that a step's message at this place comes from."""
        if len(self.chunks) == 1:
            return 0
        return self._order(direction, get_num_microbatches())[index]

    def _order(self, direction: Direction, micro_batches: int) -> list[int]:
        """The chunks of a step's messages, in their order."""
        if (direction, micro_batches) not in self._orders:
            chunks = len(self.chunks)
            group = self.args.microbatch_group_size_per_vp_stage or self.stages
            table = [chunk for _, chunk in schedules.get_schedule_table(micro_batches, chunks, group)]
            if direction == "backward":  # the first chunk of the first stage sends none
                order = [chunks - 1 - chunk for chunk in table if self.stage > 0 or chunk < chunks - 1]
            else:  # nor does the last chunk of the last stage
                order = [chunk for chunk in table if self.stage < self.stages - 1 or chunk < chunks - 1]
            self._orders[direction, micro_batches] = order
        return self._orders[direction, micro_batches]

    def _measure(self, direction: Direction, matrix: Tensor, step: Step) -> None:
        sample = self.sampler.sample(f"{direction} {self._messages['sent', direction]}", matrix, step.iteration)
        if len(sample) < 2:  # of so little there is no entropy
            return
        if direction == "backward":
            sample = sample.float()  # in fp16 small entries would become 0
            if step.loss_scale is not None:
                sample = sample / step.loss_scale
            if not self.args.calculate_per_token_loss:  # else Megatron has divided the loss by their number
                sample = sample * get_num_microbatches()
        self.entropy[direction].append(ESTIMATORS[self.config.study.entropy_estimator](sample))

    def roll_back(self, iteration: int) -> None:
        """Undo what this iteration has done to the senders. Does nothing without ``repeatable``."""
        if self.repeatable and iteration == self._iteration:
            self.senders = {key: sender for key, sender in self.senders.items() if key in self._before}
            for key, state in self._before.items():
                self.senders[key].load_state_dict(state)

    def state_dict(self, iteration: int) -> dict[str, Any]:
        """What the next step depends on, and what its window has seen before it: plain values and CPU tensors.

        ``iteration`` is the next step. One that was rolled back has measured nothing.
        """
        entropy = self._entropy_before if iteration == self._iteration else self.entropy
        return {
            "senders": {
                f"{direction}:{chunk}": {
                    part: None if tensor is None else tensor.cpu() for part, tensor in sender.state_dict().items()
                }
                for (direction, chunk), sender in self.senders.items()
            },
            "entropy": {direction: [float(value) for value in seen] for direction, seen in entropy.items()},
            "bytes": [
                {direction: asdict(count) for direction, count in counts.items()}
                for counts in (self.bytes, self._window_start)
            ],
        }

    def restore_bytes(self, count: ByteCount) -> None:
        """Go on counting from a checkpoint's mean over all processes, without telling directions apart."""
        self.bytes = {"forward": count, "backward": ByteCount()}
        self._window_start = self.bytes.copy()

    def fits(self, state: dict[str, Any]) -> bool:
        """Whether its senders are this run's, and their messages of this run's size."""
        directions = {key.partition(":")[0] for key in state["senders"]}
        errors = [sender["error"] for sender in state["senders"].values()]
        return directions <= set(self.directions) and all(
            error is None or tuple(error.shape) == message_shape(self.args) for error in errors
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken."""
        device = next(parameter for chunk in self.chunks for parameter in chunk.parameters()).device
        for key, kept in state["senders"].items():
            direction, _, chunk = key.partition(":")
            on_device = {part: None if tensor is None else tensor.to(device) for part, tensor in kept.items()}
            self._sender(direction, int(chunk)).load_state_dict(on_device)
        self.entropy = {direction: list(values) for direction, values in state["entropy"].items()}
        self.bytes, self._window_start = (
            {direction: ByteCount(**count) for direction, count in counts.items()} for counts in state["bytes"]
        )

    def take_window(self) -> list[MessageWindow]:
        """What was seen of the messages that this process sends since the last call.

        Raises ``UnexpectedMessage`` if on CUDA one has arrived that should not have.
        """
        if self._wrong is not None and bool(self._wrong):
            raise UnexpectedMessage(f"stage {self.stage + 1} has got a message that was not the next one")
        windows = []
        for boundary in self.boundaries:
            if boundary.sender == self.stage:
                direction = boundary.direction
                windows.append(
                    MessageWindow(
                        boundary,
                        mean_of_finite(self.entropy[direction]),
                        self.bytes[direction] - self._window_start[direction],
                        self.state_bytes(direction),
                        self._take_spikes(direction),
                    )
                )
                self.entropy[direction] = []
        self._window_start = self.bytes.copy()
        return windows

    def _take_spikes(self, direction: Direction) -> float:
        senders = [sender for key, sender in self.senders.items() if key[0] == direction]
        spikes = sum(float(sender.spikes) for sender in senders)
        for sender in senders:
            sender.spikes = 0.0
        return spikes

    def state_bytes(self, direction: Direction) -> int:
        """Memory of the senders' state between two steps."""
        states = [
            kept
            for key in self.senders
            for kept in (self.senders[key].state_dict(), self._before.get(key, {}))
            if key[0] == direction
        ]
        tensors = {id(tensor): tensor for state in states for tensor in state.values() if tensor is not None}
        return sum(tensor.nbytes for tensor in tensors.values())

    def byte_count(self) -> ByteCount:
        """Bytes so far."""
        return self.bytes["forward"] + self.bytes["backward"]


def _neighbour(sender: int, direction: str, stages: int, ring: bool) -> int | None:
    receiver = sender + (1 if direction == "forward" else -1)
    return receiver % stages if ring or 0 <= receiver < stages else None


@dataclass
class Incoming:
    """A tensor that is on its way: ``buffer`` is what is received, ``tensor`` what Megatron gets."""

    tensor: Tensor
    buffer: Tensor
    form: MessageFormat | None = None
    header: Tensor | None = None
    boundary: str = ""
    wrong: Tensor | None = None  # on CUDA: whether any message so far was another one
    finished: bool = False

    def finish(self) -> None:
        """Check the message that has come, and put it into the tensor. More than once does nothing."""
        if self.finished or self.form is None:
            return
        self.finished = True
        assert self.header is not None
        seen = self.buffer[:HEADER_BYTES].view(torch.int64)
        with own_arithmetic(self.tensor.device):
            values = self.form.decode(self.buffer[: self.form.bytes]).view(self.tensor.shape)
            if self.tensor.is_cuda:  # the host does not wait to look at it
                wrong = (seen != self.header.to(seen.device, non_blocking=True)).any()
                assert self.wrong is not None
                self.wrong |= wrong
                values = torch.where(wrong, torch.nan, values)
            elif seen.tolist() != self.header.tolist():
                raise UnexpectedMessage(
                    f"{self.boundary}: expected {described_header(self.header.tolist())}; "
                    f"got {described_header(seen.tolist())}"
                )
            self.tensor.copy_(values)
