"""What a checkpoint holds of a process: tensors of any length in one, and measurements, there and back."""

import math
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from edgc.byte_counts import ByteCount
from edgc.comm.packed import Packed
from edgc.comm.wire import FP32, wire
from edgc.config import EDGCConfig
from edgc.hosts.checkpoint import stage_state, unpacked
from edgc.hosts.steps import Step
from edgc.observe.measurements import Measurements
from edgc.observe.moments import GradientStatistics
from edgc.observe.sampler import GradientSampler
from edgc.observe.window import Boundary
from megatron.edgc.messages import pipeline_messages
from megatron.edgc.messages.pipeline_messages import PipelineMessages


class State:
    """Of a reducer's state, what a checkpoint asks for; also a part that this release does not know."""

    def __init__(self) -> None:
        self.errors = {"a": torch.randn(3, 5), "b": torch.randn(7)}
        self.parts = {
            "engine": {"a:0": Packed(torch.randn(3, 1), wire("bf16")), "b:0": Packed(torch.randn(7), FP32)},
            "another": {"a:norm": Packed(torch.tensor(2.5), FP32), "b:x": Packed(torch.randn(200), wire("int4"))},
            "empty": {},
        }

    def summed_errors(self, communicator: object, iteration: int) -> Iterator[tuple[str, Tensor]]:
        yield from self.errors.items()

    def state_dict(self) -> dict[str, dict[str, Packed]]:
        return {"error": {}, **self.parts}


def test_every_part_of_a_reducers_state_comes_back() -> None:
    torch.manual_seed(0)
    state = State()
    stage: Any = SimpleNamespace(reducers=[SimpleNamespace(state=state, communicator=None)])
    found = {name: unpacked(message, contents, message.device) for name, contents, message in stage_state(stage, 3)}
    assert list(found) == ["error.a", "error.b", "engine", "another"]
    for name, total in state.errors.items():
        assert torch.equal(found[f"error.{name}"][name].values(), total)
    for part in ("engine", "another"):
        for name, packed in state.parts[part].items():
            assert found[part][name].shape == packed.shape
            assert torch.equal(found[part][name].values(), packed.values())


def test_measurements_come_back_as_plain_values() -> None:
    seen = Measurements(
        entropy=[torch.tensor(-3.5)],
        residual=[0.25],
        energies=[{"a": torch.tensor([1.0, 2.0])}],
        statistics=[{"a": GradientStatistics.of(torch.randn(100))}],
        fidelity=[{"a": torch.tensor([3.0])}],
        row_shares=[{"a": torch.tensor([0.5, 0.75])}],
        spikes=torch.tensor(2),
        largest_spike=torch.tensor(17.0),
        windows=3,
    )
    state = seen.state_dict()
    assert state.keys() == vars(seen).keys() - {"windows"}
    assert [type(state[name][0]) for name in ("entropy", "residual")] == [float, float]
    assert type(state["statistics"][0]["a"]) is dict
    found = Measurements.from_state_dict(state)
    assert (found.entropy, found.residual, found.spikes, found.largest_spike) == ([-3.5], [0.25], 2.0, 17.0)
    for name in ("energies", "fidelity", "row_shares"):
        assert torch.equal(getattr(found, name)[0]["a"], getattr(seen, name)[0]["a"])
    assert found.statistics == seen.statistics and found.windows == 0


def test_of_a_sample_of_one_entry_there_is_no_entropy() -> None:
    messages = of_messages()
    for rate, seen in ((1e-6, 0), (0.5, 1)):
        messages.sampler = GradientSampler(iteration_rate=1.0, gradient_rate=rate)
        messages._measure("backward", torch.randn(32, 128), Step(0, None))
        assert len(messages.entropy["backward"]) == seen


def test_messages_of_which_no_copy_is_kept_are_not_rolled_back() -> None:
    messages = PipelineMessages.__new__(PipelineMessages)
    messages.repeatable, messages._iteration, messages._before = False, 3, {}
    sender: Any = object()
    messages.senders = {("backward", 0): sender}
    messages.roll_back(3)
    assert messages.senders == {("backward", 0): sender}


def of_messages(**parts: Any) -> PipelineMessages:
    """Stage 2 of a pipeline, with what these tests need."""
    messages = PipelineMessages.__new__(PipelineMessages)
    messages.config, messages.stage, messages.senders, messages._messages = EDGCConfig(), 1, {}, Counter()
    messages.bytes = {"forward": ByteCount(), "backward": ByteCount()}
    messages.entropy = {"forward": [], "backward": []}
    messages.args = Namespace(calculate_per_token_loss=True)
    for name, value in parts.items():
        setattr(messages, name, value)
    return messages


def test_messages_of_a_pass_without_gradients_are_of_no_training_step() -> None:
    messages = of_messages(chunks=[torch.nn.Linear(2, 2)])
    assert messages.training
    with torch.no_grad():
        assert not messages.training
    messages.chunks[0].eval()
    assert not messages.training


@pytest.mark.parametrize("per_token", [False, True])
def test_the_entropy_of_messages_has_no_unit_of_loss_scale_or_micro_batches(
    per_token: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron divides the loss of each micro-batch by their number, unless losses count by tokens."""
    messages = of_messages(
        sampler=GradientSampler(iteration_rate=1.0, gradient_rate=1.0),
        args=Namespace(calculate_per_token_loss=per_token),
    )
    matrix = torch.randn(32, 128)
    for count in (1, 4):
        monkeypatch.setattr(pipeline_messages, "get_num_microbatches", lambda count=count: count)
        gradient = matrix if per_token else matrix / count
        for scale in (None, torch.tensor(1024.0)):
            messages._measure("backward", gradient * (1.0 if scale is None else scale), Step(0, scale))
    messages._measure("forward", matrix, Step(0, torch.tensor(1024.0)))  # activations have neither
    (of_activations,) = messages.entropy["forward"]
    assert [float(one) for one in messages.entropy["backward"]] == pytest.approx(4 * [float(of_activations)], abs=1e-4)


def test_only_gradients_leave_errors_and_a_spike_is_told_once() -> None:
    messages = of_messages()
    backward, forward = messages._sender("backward", 0), messages._sender("forward", 0)
    assert backward.feedback and not forward.feedback
    backward.spikes = torch.tensor(2.0)
    told = [messages._take_spikes("forward"), messages._take_spikes("backward"), messages._take_spikes("backward")]
    assert told == [0, 2, 0]


def test_what_a_step_has_measured_of_messages_is_not_saved_before_its_end_though_it_was_run_again() -> None:
    """A resumed run makes the step, and measures it, once more."""
    sampler = GradientSampler(iteration_rate=1.0, gradient_rate=1.0)
    messages = of_messages(sampler=sampler, repeatable=True, step=lambda: Step(3, None), _iteration=2, _before={})
    messages._window_start = messages.bytes.copy()
    messages.entropy["backward"] = [2.0]
    messages.begin()
    messages._measure("backward", torch.randn(32, 128), messages.step())
    messages.begin()  # again, and a step is measured once
    found = [len(messages.state_dict(iteration)["entropy"]["backward"]) for iteration in (3, 4)]
    assert found == [1, 2]


def test_messages_that_are_not_compressed_are_counted() -> None:
    messages, tensor = of_messages(directions=("backward",)), torch.zeros(4, 2, 8)
    assert messages.outgoing("forward", tensor) is tensor
    assert messages.byte_count() == ByteCount(256, 256, 256)


@pytest.mark.parametrize(("sender", "compressed"), [(1, 3), (2, 2), (3, 1)])
def test_messages_are_compressed_in_the_epilogue_alone_whose_length_goes_with_the_stage(
    sender: int, compressed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier the receiver, the more backward passes it has left once its forward passes are done."""
    monkeypatch.setattr(pipeline_messages, "get_num_microbatches", lambda: 8)
    messages = of_messages(
        config=EDGCConfig.of(pp="epilogue:powersgd:4"),
        stages=4,
        boundaries=[Boundary("backward", one, one - 1) for one in (1, 2, 3)],
        step=lambda: Step(0, None, message_ranks=(4, 4, 4)),
    )
    forms = [messages._format("backward", sender, index, (16, 1, 32), torch.float32) for index in range(8)]
    assert [form.rank for form in forms] == [None] * (8 - compressed) + [4] * compressed


def test_a_window_of_messages_begins_with_nothing_of_the_one_before() -> None:
    messages = of_messages(boundaries=[Boundary("backward", 1, 0)], _wrong=None, _before={})
    messages._window_start = messages.bytes.copy()
    messages.entropy["backward"] = [2.0]
    for entropy, count in ((2.0, ByteCount(1, 2, 3)), (math.nan, ByteCount(4, 5, 6))):
        messages.bytes["backward"] += count
        (window,) = messages.take_window()
        assert (window.entropy, window.bytes) == (pytest.approx(entropy, nan_ok=True), count)


@pytest.mark.parametrize(
    ("sender", "shape", "fits"),
    [
        ("backward:0", (64, 32), True),
        ("backward:0", None, True),
        ("backward:0", (32, 32), False),
        ("forward:0", (64, 32), False),
    ],
)
def test_what_was_left_unsent_of_messages_fits_those_of_its_size_and_direction(
    sender: str, shape: tuple[int, int] | None, fits: bool
) -> None:
    args = Namespace(
        seq_length=64, micro_batch_size=1, context_parallel_size=1, sequence_parallel=False, hidden_size=32
    )
    messages = of_messages(args=args, directions=("backward",))
    error = None if shape is None else torch.zeros(shape)
    assert messages.fits({"senders": {sender: {"error": error}}}) == fits
