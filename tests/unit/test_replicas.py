import pytest
import torch

from edgc.comm.packed import Packed
from edgc.comm.replicas import HASHED_BYTES, check, digest, digests_by_parameter
from edgc.comm.wire import FP32
from edgc.errors import ReplicaMismatch

NAMES = ["a", "b"]


def digests(processes: int) -> torch.Tensor:
    return torch.arange(8).view(1, 2, 4).repeat(processes, 1, 1)


def test_any_bit_changes_a_digest() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        values = torch.randn(13, 5).mul(50).to(dtype)
        seen = {int(digest(values))}
        for place in range(values.numel()):
            changed = values.clone()
            octets = changed.view(-1)[place : place + 1].view(torch.uint8)
            octets ^= 1
            seen.add(int(digest(changed)))
        assert len(seen) == values.numel() + 1
    assert int(digest(torch.tensor([1.0, 2.0]))) != int(digest(torch.tensor([2.0, 1.0])))
    assert int(digest(torch.empty(0))) == 0


def test_a_view_has_the_digest_of_its_values() -> None:
    values = torch.randn(6, 4)
    assert int(digest(values.T)) == int(digest(values.T.contiguous()))


def test_what_lies_beyond_the_largest_size_is_not_read() -> None:
    values = torch.zeros(HASHED_BYTES // 4 + 2)

    def digests() -> tuple[int, int]:
        """Of the values, and of the same kept as a part of a state."""
        return int(digest(values)), int(digests_by_parameter({"w:0": Packed(values, FP32)})["w"])

    before = digests()
    values[-1] = 1.0
    assert digests() == before
    values[HASHED_BYTES // 4 - 1] = 1.0
    assert all(now != then for now, then in zip(digests(), before, strict=True))


def test_equal_digests_pass() -> None:
    check(NAMES, digests(4), [0, 2, 4, 6], 7)


def test_the_process_that_differs_from_most_is_named() -> None:
    seen = digests(3)
    seen[1, 1, 1] += 1
    with pytest.raises(ReplicaMismatch, match=r"iteration 8: process 4 holds other bits .* in the factors of b\."):
        check(NAMES, seen, [0, 4, 8], 7)


def test_of_two_both_are_named() -> None:
    seen = digests(2)
    seen[1, 0, 2] += 1
    with pytest.raises(ReplicaMismatch, match=r"processes 3, 5 of one .* different bits in the scales of a\."):
        check(NAMES, seen, [3, 5], 7)
