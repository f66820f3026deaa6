import torch

from edgc.error_feedback import ErrorFeedback


def test_an_error_is_added_until_something_else_is_stored() -> None:
    feedback = ErrorFeedback(torch.float32)
    gradient = torch.ones(2, 3)
    feedback.add_to("w", gradient)
    assert torch.equal(gradient, torch.ones(2, 3))
    feedback.store("w", torch.full((2, 3), 2.0))
    for expected in (3.0, 5.0):
        feedback.add_to("w", gradient)
        assert torch.equal(gradient, torch.full((2, 3), expected))
    assert feedback.squared_norm() == 24.0
    flat = torch.zeros(6)
    feedback.add_to("w", flat)  # an engine that works on vectors finds what another left as a matrix
    assert torch.equal(flat, torch.full((6,), 2.0))
    feedback.clear("w")
    feedback.add_to("w", flat)
    assert torch.equal(flat, torch.full((6,), 2.0)) and not feedback.errors


def test_errors_are_kept_in_the_type_that_was_asked_for() -> None:
    feedback = ErrorFeedback(torch.bfloat16)
    feedback.store("w", torch.full((4,), 1.001))
    gradient = torch.zeros(4)
    feedback.add_to("w", gradient)
    assert torch.equal(gradient, torch.ones(4))


def test_a_moving_average_takes_in_new_errors_by_and_by() -> None:
    feedback = ErrorFeedback(torch.float32, average=0.75)
    feedback.store("w", torch.full((2, 3), 8.0))
    assert torch.equal(feedback.errors["w"], torch.full((2, 3), 2.0))
    feedback.store("w", torch.full((6,), 4.0))
    assert torch.equal(feedback.errors["w"], torch.full((6,), 2.5))
