import pytest
import torch

from edgc.comm.wire import FP32, wire
from edgc.compress.error_feedback import ErrorFeedback, ErrorRule
from edgc.compress.state import CompressionState
from edgc.config import EDGCConfig

YES, NO = torch.tensor(True), torch.tensor(False)


def feedback_of(rule: ErrorRule | None = None) -> ErrorFeedback:
    return ErrorFeedback(rule or ErrorRule(FP32), torch.device("cpu"), "test")


def test_an_error_is_added_until_something_else_is_stored() -> None:
    feedback = feedback_of()
    gradient = torch.ones(2, 3)
    feedback.add_to({"w": gradient})
    assert torch.equal(gradient, torch.ones(2, 3))
    feedback.store({"w": torch.full((2, 3), 2.0)}, YES, 0)
    for expected in (3.0, 5.0):
        feedback.add_to({"w": gradient})
        assert torch.equal(gradient, torch.full((2, 3), expected))
    assert feedback.squared_norm() == 24.0
    flat = torch.zeros(6)
    feedback.add_to({"w": flat})  # an engine that works on vectors finds what another left as a matrix
    assert torch.equal(flat, torch.full((6,), 2.0))
    feedback.clear("w")
    feedback.add_to({"w": flat})
    assert torch.equal(flat, torch.full((6,), 2.0)) and not feedback.packed


def test_errors_are_kept_in_the_type_that_was_asked_for() -> None:
    feedback = feedback_of(ErrorRule(wire("bf16")))
    feedback.store({"w": torch.full((4,), 1.001)}, YES, 0)
    gradient = torch.zeros(4)
    feedback.add_to({"w": gradient})
    assert torch.equal(gradient, torch.ones(4))


def test_a_moving_average_takes_in_new_errors_by_and_by() -> None:
    feedback = feedback_of(ErrorRule(FP32, average=0.75))
    feedback.store({"w": torch.full((2, 3), 8.0)}, YES, 0)
    assert torch.equal(feedback.packed["w"].values(), torch.full((2, 3), 2.0))
    feedback.store({"w": torch.full((6,), 4.0)}, YES, 0)
    assert torch.equal(feedback.packed["w"].values(), torch.full((6,), 2.5))


def test_what_was_not_finite_leaves_the_older_error_bit_for_bit() -> None:
    for name in ("fp32", "bf16", "fp16", "fp8", "int8"):
        feedback = feedback_of(ErrorRule(wire(name, stochastic=name != "fp32")))
        feedback.store({"w": torch.randn(5, 7)}, YES, 0)
        before = feedback.packed["w"].message.clone()
        feedback.store({"w": torch.full((5, 7), torch.nan)}, NO, 1)
        assert torch.equal(feedback.packed["w"].message, before)
        feedback.store({"v": torch.full((5, 7), torch.nan)}, NO, 1)
        assert torch.equal(feedback.packed["v"].values(), torch.zeros(5, 7))


def test_a_small_error_is_not_lost_in_a_large_one() -> None:
    """Steps of a thousandth on an error of 1 are below half a bf16 step: to the nearest, they would be lost."""
    grown = {}
    for stochastic in (False, True):
        feedback = feedback_of(ErrorRule(wire("bf16", stochastic=stochastic)))
        feedback.store({"w": torch.ones(4096)}, YES, 0)
        for step in range(200):
            error = torch.full((4096,), 0.001)
            feedback.add_to({"w": error})
            feedback.store({"w": error}, YES, step)
        grown[stochastic] = float(feedback.packed["w"].values().mean())
    assert grown[False] == 1.0
    assert abs(grown[True] - 1.2) < 0.005


def test_errors_are_dropped_at_times_if_the_rule_says_so() -> None:
    feedback = feedback_of()
    rule = ErrorRule(wire("int8"), reset_every=3)
    feedback.store({"w": torch.ones(4)}, YES, 0)  # by the own rule
    for iteration, expected in ((1, 2.0), (2, 0.0), (3, 2.0)):
        feedback.store({"w": torch.full((4,), 2.0)}, YES, iteration, rule)
        assert torch.allclose(feedback.packed["w"].values(), torch.full((4,), expected), rtol=0.01)
    feedback.store({"w": torch.ones(4)}, NO, 4)  # another format is no reason to lose it
    assert torch.allclose(feedback.packed["w"].values(), torch.full((4,), 2.0), rtol=0.01)


def test_every_process_draws_its_own_rounding_and_draws_it_again() -> None:
    rule = ErrorRule(wire("bf16", stochastic=True))
    kept = []
    for process in (0, 0, 1):
        feedback = ErrorFeedback(rule, torch.device("cpu"), 1234, process)
        feedback.store({"w": torch.full((256,), 1.001)}, YES, 5)
        kept.append(feedback.packed["w"].values())
    assert torch.equal(kept[0], kept[1]) and not torch.equal(kept[0], kept[2])


def test_rounding_at_random_differs_from_step_to_step_and_has_no_bias() -> None:
    """With the same draw in every step an error would be pushed the same way for ever."""
    kept = []
    for iteration in range(400):
        feedback = ErrorFeedback(ErrorRule(wire("bf16", stochastic=True)), torch.device("cpu"), 1234, 0)
        feedback.store({"w": torch.full((16,), 1.002)}, YES, iteration)
        kept.append(feedback.packed["w"].values())
    assert not torch.equal(kept[0], kept[1])
    # bf16 has steps of 1/128 here: each mean is of 400 draws of 1 or 1.0078, and 1.002 within 4 standard errors
    assert torch.allclose(torch.stack(kept).mean(dim=0), torch.full((16,), 1.002), atol=7e-4, rtol=0)


def test_an_error_is_rounded_alike_whatever_is_stored_beside_it() -> None:
    rule = ErrorRule(wire("bf16", stochastic=True))
    sizes = {"a": 256, "b": 512, "c": 256}
    together = feedback_of(rule)
    together.store({name: torch.full((size,), 1.001) for name, size in sizes.items()}, YES, 5)
    for name, size in sizes.items():
        alone = feedback_of(rule)
        alone.store({name: torch.full((size,), 1.001)}, YES, 5)
        assert torch.equal(alone.packed[name].values(), together.packed[name].values()), name


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8", "int8"])
def test_the_random_numbers_of_training_stay_as_they_are(name: str) -> None:
    feedback, before = feedback_of(ErrorRule(wire(name, stochastic=True))), torch.get_rng_state()
    feedback.store({"w": torch.full((8, 16), 1.5)}, YES, 0)
    feedback.store({"w": torch.ones(8, 16)}, YES, 1, ErrorRule(wire("int4", stochastic=True)))
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError, match="needs a generator"):
        wire(name, stochastic=True).encode(torch.ones(1, 128))


def test_processes_of_a_group_round_their_errors_with_random_numbers_of_their_own() -> None:
    kept = []
    for process in (0, 0, 1):
        state = CompressionState(EDGCConfig.of(error_dtype="bf16"), None, torch.device("cpu"), process)
        state.feedback.store({"w": torch.full((256,), 1.001)}, torch.tensor(True), 5)
        kept.append(state.feedback.packed["w"].values())
    assert torch.equal(kept[0], kept[1]) and not torch.equal(kept[0], kept[2])
