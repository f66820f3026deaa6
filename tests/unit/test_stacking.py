"""Tensors of equal shape handled at once."""

import pytest
import torch
from torch import Tensor

from edgc import stacking
from edgc.comm.packed import Packed, _chosen, choose_all, pack_all, unpack_all
from edgc.comm.wire import WIRES, wire
from edgc.compress.batch import Batch, Operand
from edgc.stacking import by_like_rank, map_padded, map_stacked, padded, stacked, stacked_view


def layers(gap: int = 7) -> list[Tensor]:
    """Three matrices that lie equally far apart in one buffer."""
    buffer = torch.randn(3 * (12 + gap))
    return [buffer[start : start + 12].view(3, 4) for start in range(0, len(buffer), 12 + gap)]


def test_equal_matrices_of_a_buffer_are_one_view() -> None:
    matrices = layers()
    for several in (matrices, [matrix.T for matrix in matrices]):
        view = stacked_view(several)
        assert view is not None and view.data_ptr() == matrices[0].data_ptr()
        assert torch.equal(view, torch.stack(several))
    parts = torch.randn(5, 2, 6).unbind(0)
    assert stacked(parts).data_ptr() == parts[0].data_ptr()


def test_what_lies_otherwise_is_none_or_copied() -> None:
    first, second, third = layers()
    for several in ([first, third, second], [third, second, first], [first, second, torch.randn(3, 4)], [first, first]):
        assert stacked_view(several) is None
        assert torch.equal(stacked(several), torch.stack(several))


def test_a_function_is_called_once_for_each_shape_and_results_keep_their_places() -> None:
    tensors = [torch.randn(2, 3), torch.randn(4), torch.randn(2, 3), torch.randn(4), torch.randn(2, 3)]
    factors = [torch.tensor(float(place)) for place in range(5)]
    calls = []

    def scaled(several: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(several.shape)
        return several * by.view(-1, *[1] * (several.dim() - 1)), by

    for place, (result, by) in enumerate(map_stacked(scaled, tensors, factors)):
        assert torch.equal(result, place * tensors[place]) and by == place
    assert calls == [(3, 2, 3), (2, 4)]


def test_tensors_are_stacked_in_their_order_wherever_they_lie() -> None:
    """Else a resumed run, whose tensors lie elsewhere, would add up in another order."""
    buffer = torch.randn(4, 3)
    seen = []

    def noted(several: Tensor) -> Tensor:
        seen.append(several.clone())
        return several

    backwards = [buffer[3], torch.randn(3), buffer[0], buffer[2]]
    map_stacked(noted, backwards)
    map_stacked(noted, [tensor.clone() for tensor in backwards])
    assert torch.equal(seen[0], torch.stack(backwards)) and torch.equal(seen[0], seen[1])


def test_many_are_packed_and_chosen_as_each_is() -> None:
    tensors = [torch.randn(9, 5), torch.randn(30), torch.randn(9, 5), torch.randn(5, 9)]
    for name in WIRES:
        form = wire(name, hadamard=True)
        packed, zeros = pack_all(tensors, form), [Packed(torch.zeros_like(tensor), form) for tensor in tensors]
        for values, one, tensor in zip(unpack_all(packed), packed, tensors, strict=True):
            alone = Packed(tensor, form)
            assert torch.equal(one.message, alone.message) and one.shape == alone.shape
            torch.testing.assert_close(values, alone.values())
        for condition, expected in ((True, packed), (False, zeros)):
            chosen = choose_all([torch.tensor(condition)] * len(packed), packed, zeros)
            assert all(torch.equal(one.message, other.message) for one, other in zip(chosen, expected, strict=True))
            # as on a device, whose conditions the host does not know
            either = torch.tensor(condition).view(1, 1, 1)
            for one, other, right in zip(packed, zeros, expected, strict=True):
                assert torch.equal(
                    _chosen(either, one.message.unsqueeze(0), other.message.unsqueeze(0))[0], right.message
                )


def test_a_tensor_is_rounded_by_its_own_seed_and_by_no_other() -> None:
    """Errors that every step rounds by the same numbers would drift."""
    form, generator = wire("int8", stochastic=True), torch.Generator()
    tensor = torch.randn(300, generator=torch.Generator().manual_seed(0))

    def rounded(*seeds: int) -> list[Tensor]:
        return [one.message for one in pack_all([tensor] * len(seeds), form, generator, seeds)]

    first, again, other = rounded(7, 7, 8)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(rounded(8)[0], other), "neither neighbours nor what was drawn before matter"
    mean = torch.stack([one.values() for one in pack_all([tensor] * 400, form, generator, range(400))]).mean(dim=0)
    assert float((mean - tensor).abs().max()) < 0.15 * float(tensor.abs().max()) / 127, "and unbiased over seeds"


def test_factors_of_like_ranks_are_padded_to_the_largest() -> None:
    ranks = (4, 7, 8, 3, 16)
    factors, others = [torch.randn(5, rank) for rank in ranks], [torch.randn(6, 1) for _ in ranks]
    seen: list[tuple[int, ...]] = []

    def noted(several: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(tuple(several.shape))
        assert beside.shape == (len(several), 6, 1)
        return several * 2, beside[:, 0, 0]

    found = map_padded(noted, factors, others)
    assert seen == [(2, 5, 16), (2, 5, 7), (1, 5, 3)], "each has at least half of the largest rank"
    for factor, other, (double, first) in zip(factors, others, found, strict=True):
        rank = factor.shape[1]
        assert torch.equal(double[:, :rank], 2 * factor) and not double[:, rank:].any()
        assert first == other[0, 0]


def test_columns_that_were_cut_off_are_found_again_without_a_copy() -> None:
    whole = torch.randn(3, 6, 5)
    cut = [part[:, :columns] for part, columns in zip(whole, (5, 2, 4), strict=True)]
    assert padded(cut, zeros=False).data_ptr() == whole.data_ptr() and torch.equal(padded(cut, zeros=False), whole)
    with_zeros = padded(cut)
    assert with_zeros.data_ptr() != whole.data_ptr() and not with_zeros[1, :, 2:].any()
    assert torch.equal(with_zeros[1, :, :2], cut[1])
    # the last one has no fifth column behind it
    at_the_end = [part[:, 1:][:, :columns] for part, columns in zip(whole, (4, 3, 3), strict=True)]
    assert torch.equal(padded(at_the_end, zeros=False)[2, :, :3], at_the_end[2])
    beyond = [whole.view(-1)[start : start + 6 * 4].view(6, 4)[:, :n] for start, n in ((0, 4), (33, 3), (66, 2))]
    for one, own in zip(padded(beyond, zeros=False), beyond, strict=True):
        assert torch.equal(one[:, : own.shape[1]], own)


def test_factors_of_like_ranks_give_the_same_on_a_gpu_as_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Projections and products of a batch, with scales and without, in one buffer and not, of ranks 3 to 20."""
    buffer = torch.randn(6 * 30 * 20)
    matrices = {f"{place}": buffer[place * 600 :][:600].view(30, 20) for place in range(5)} | {
        "odd": torch.randn(30, 20)
    }
    scales = {name: (torch.rand(30, 1) + 0.5, torch.rand(1, 20) + 0.5) for name in matrices if name != "1"}
    ranks = dict(zip(matrices, (3, 5, 9, 20, 7, 12), strict=True))
    left = [torch.randn(30, rank) for rank in ranks.values()]
    right = [torch.randn(rank, 20) for rank in ranks.values()]

    def found() -> list[Tensor]:
        batch = Batch({name: Operand(matrix, scales.get(name)) for name, matrix in matrices.items()})
        products = [*batch.multiplied_by([one.T for one in left]), *batch.T.multiplied_by(right)]
        return products + [
            factor
            for by_name in batch.restored(left, right, right)
            for one in by_name.values()
            for factor in (one.left, one.right)
        ]

    alone = found()
    monkeypatch.setattr(stacking, "on_cpu", lambda tensor: False)
    assert len(by_like_rank(left)) == 3, "3 and 5; 7 to 12; 20"
    for one, other in zip(found(), alone, strict=True):
        assert one.shape == other.shape and torch.allclose(one, other, atol=1e-5)
