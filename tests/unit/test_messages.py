"""Messages in low rank: what arrives, what is left for the next one, and how much travels."""

import pytest
import torch

from edgc.comm.wire import wire
from edgc.compress.message_sender import HEADER_BYTES, MessageFormat, MessageSender, described_header

ROWS, COLS = 48, 32


def form(rank: int | None, name: str = "fp32", dtype: torch.dtype = torch.float32) -> MessageFormat:
    return MessageFormat(ROWS, COLS, rank, wire(name, hadamard=name.startswith("int")), dtype)


def noise(step: int, rank: int = 10) -> torch.Tensor:
    """Of this rank, but for a little."""
    generator = torch.Generator().manual_seed(step)
    low = torch.randn(ROWS, rank, generator=generator) @ torch.randn(rank, COLS, generator=generator)
    return low + 0.01 * torch.randn(ROWS, COLS, generator=generator)


def send(sender: MessageSender, matrix: torch.Tensor, how: MessageFormat, **scaled: torch.Tensor) -> torch.Tensor:
    message = sender.encode(matrix, how, how.header(7, 1, True, 3), **scaled)
    assert message.dtype == torch.uint8 and len(message) == how.bytes
    header = message[:HEADER_BYTES].view(torch.int64).tolist()
    assert described_header(header) == f"{how.bytes} bytes of rank {how.used_rank or 0}, message 4 of stage 2 in step 7"
    return how.decode(message)


@pytest.mark.parametrize(("name", "size"), [("fp32", 4), ("bf16", 2)])
def test_a_message_has_the_size_of_its_factors(name: str, size: int) -> None:
    how = form(8, name)
    send(MessageSender(True, 1, spike_limit=5.0), noise(0), how)
    assert how.bytes == (ROWS + COLS) * 8 * size + HEADER_BYTES


def test_few_bits_take_few_bytes() -> None:
    how = form(8, "int4")
    send(MessageSender(True, 1, spike_limit=5.0), noise(0), how)
    assert how.bytes == (ROWS + COLS) * 8 // 2 + (ROWS + COLS) * 8 // 128 * 2 + HEADER_BYTES


@pytest.mark.parametrize(("name", "size"), [("int8", 1), ("int4", 1 / 2), ("int2", 1 / 4)])
def test_at_rank_0_the_values_travel_rounded(name: str, size: float) -> None:
    how, matrix = form(0, name), noise(0)
    arrived = send(MessageSender(False, 1, spike_limit=5.0), matrix, how)
    assert how.bytes == ROWS * COLS * size + ROWS * COLS // 128 * 2 + HEADER_BYTES
    apart = torch.linalg.matrix_norm(arrived - matrix) / torch.linalg.matrix_norm(matrix)
    assert 0 < apart < {1: 0.01, 1 / 2: 0.15, 1 / 4: 0.5}[size]
    broken = matrix.clone()
    broken[3, 5] = torch.inf
    assert not torch.isfinite(send(MessageSender(True, 1, spike_limit=5.0), broken, how)).all()


def test_a_rank_that_does_not_pay_sends_the_values() -> None:
    assert form(20).used_rank is None and form(19).used_rank == 19
    assert form(None).bytes == ROWS * COLS * 4 + HEADER_BYTES
    matrix = noise(0)
    assert torch.equal(send(MessageSender(True, 1, spike_limit=5.0), matrix, form(20)), matrix)


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4"])
def test_over_the_messages_sent_and_left_are_what_was_put_in(name: str) -> None:
    sender, put_in, arrived = MessageSender(True, 1, spike_limit=5.0), torch.zeros(ROWS, COLS), torch.zeros(ROWS, COLS)
    for step, rank in enumerate([None, 4, 4, 8, 0, 0, 4, 2, None, 4, 8]):
        put_in += noise(step)
        arrived += send(sender, noise(step), form(rank, name))
        assert sender.error is not None or step == 0
        left = 0 if sender.error is None else sender.error
        torch.testing.assert_close(arrived + left, put_in, atol=1e-3, rtol=0)
    assert torch.linalg.matrix_norm(sender.error) > 1


def test_what_is_left_goes_with_the_next_values_that_travel_as_they_are() -> None:
    sender = MessageSender(True, 1, spike_limit=5.0)
    first = send(sender, noise(0), form(2))
    second = send(sender, noise(1), form(None))
    torch.testing.assert_close(first + second, noise(0) + noise(1), atol=1e-4, rtol=0)
    assert sender.error is not None and sender.error.abs().max() < 1e-5


def test_without_feedback_nothing_is_kept_but_a_start() -> None:
    sender = MessageSender(False, 1, spike_limit=5.0)
    send(sender, noise(0), form(4))
    assert sender.error is None and sender.basis is not None


def test_a_rank_that_holds_all_there_is_sends_all() -> None:
    low = torch.linalg.svd(noise(0, rank=4), full_matrices=False)
    matrix = low.U[:, :4] * low.S[:4] @ low.Vh[:4]
    torch.testing.assert_close(
        send(MessageSender(True, 1, spike_limit=5.0), matrix, form(6)), matrix, atol=1e-4, rtol=0
    )


def test_a_warm_start_finds_the_same_directions_better() -> None:
    matrix, how = noise(0, rank=32), form(4)
    warm = MessageSender(False, 1, spike_limit=5.0)
    gaps = [float((send(warm, matrix, how) - matrix).norm()) for _ in range(6)]
    assert gaps[-1] < 0.9 * gaps[0]


def test_the_error_does_not_grow_with_the_loss_scale() -> None:
    plain, scaled = MessageSender(True, 1, spike_limit=5.0), MessageSender(True, 1, spike_limit=5.0)
    for step, scale in enumerate([8.0, 1024.0, 2.0]):
        expected = send(plain, noise(step), form(4))
        arrived = send(scaled, noise(step) * scale, form(4), scale=torch.tensor(scale))
        torch.testing.assert_close(arrived / scale, expected, atol=1e-3, rtol=1e-3)
    assert plain.error is not None and scaled.error is not None
    torch.testing.assert_close(scaled.error, plain.error, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["fp32", "int8"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_matrix_that_is_not_finite_arrives_so_and_changes_nothing(name: str, bad: float) -> None:
    sender = MessageSender(True, 1, spike_limit=5.0)
    send(sender, noise(0), form(4, name))
    before = sender.state_dict()
    broken = noise(1)
    broken[3, 5] = bad
    assert not torch.isfinite(send(sender, broken, form(4, name))).any()
    assert all(torch.equal(before[part], sender.state_dict()[part]) for part in before)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [4, 0])
def test_a_spike_is_not_replayed_in_later_messages(rank: int) -> None:
    """Without clipping, what a step leaves of a matrix 100 times too large drowns the next ones."""
    sender, how, truth = MessageSender(True, 1, spike_limit=5.0), form(rank, "int4"), noise(0)
    for step in range(1, 20):
        send(sender, truth + noise(step) / 2, how)
    spike = send(sender, 100 * noise(99), how)
    assert spike.norm() > 20 * truth.norm() and float(sender.spikes) == 1
    arrived = sum(send(sender, truth + noise(step) / 2, how) for step in range(20, 30))
    assert float((arrived * truth).sum() / (arrived.norm() * truth.norm())) > 0.8


def test_a_matrix_of_zeros_keeps_the_basis() -> None:
    sender, truth = MessageSender(False, 1, spike_limit=5.0), noise(0)
    for _ in range(6):
        before = (send(sender, truth, form(4)) - truth).norm()
    send(sender, torch.zeros_like(truth), form(4))
    assert (send(sender, truth, form(4)) - truth).norm() < 1.01 * before


def test_a_sender_goes_on_where_its_state_was_taken() -> None:
    sender, other = MessageSender(True, 1, spike_limit=5.0), MessageSender(True, 1, spike_limit=5.0)
    send(sender, noise(0), form(4))
    other.load_state_dict(sender.state_dict())
    assert torch.equal(send(sender, noise(1), form(4)), send(other, noise(1), form(4)))


def test_headers_differ_wherever_messages_do() -> None:
    how = form(4)
    headers = [
        how.header(step, sender, forward, place)
        for step in range(3)
        for sender in range(3)
        for forward in (False, True)
        for place in range(3)
    ]
    assert len({tuple(header.tolist()) for header in headers}) == len(headers)


@pytest.mark.parametrize("size", [1e36, 3e37, 1e38])
def test_messages_go_on_after_a_finite_one_that_is_enormous(size: float) -> None:
    torch.manual_seed(0)
    how, sender = form(4, "bf16", torch.bfloat16), MessageSender(True, 1, spike_limit=5.0)
    arrived = [send(sender, (factor * noise(0)).bfloat16(), how) for factor in (1.0, 1.0, size / 10, 1.0, 1.0)]
    assert all(bool(torch.isfinite(one).all()) for one in arrived[3:])
    assert sender.basis is not None and torch.isfinite(sender.basis).all()


def test_a_message_that_is_not_finite_is_no_spike() -> None:
    sender = MessageSender(True, 1, spike_limit=5.0)
    send(sender, noise(0), form(4))
    broken = noise(1)
    broken[3, 5] = float("inf")
    send(sender, broken, form(4))
    assert float(sender.spikes) == 0


def test_a_sender_knows_the_norm_of_before_where_its_state_was_taken() -> None:
    sender, other = MessageSender(True, 1, spike_limit=5.0), MessageSender(True, 1, spike_limit=5.0)
    send(sender, noise(0), form(4))
    other.load_state_dict(sender.state_dict())
    for one in (sender, other):
        send(one, 1000 * noise(1), form(4))
    assert float(other.spikes) == float(sender.spikes) == 1
    assert torch.equal(other.error, sender.error)
