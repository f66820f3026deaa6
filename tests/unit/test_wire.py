import math

import pytest
import torch

from edgc.comm import wire as wire_module
from edgc.comm.bit_packing import pack, unpack
from edgc.comm.wire import GROUP, WIRES, Wire, wire

ROUNDED = [name for name, format in WIRES.items() if format.bits <= 8 and not format.floating]
FLOATING = {"fp16": 10, "fp8": 3}  # bits of the mantissa
# Mean squared error of a unit normal: Max 1960 for 1 to 3 bits; step^2 / 12 from 4 bits on, where the step is the
# largest of 128 magnitudes (root mean square: 2.85) over the largest code.
EXPECTED_ERROR = {1: 0.3634, 2: 0.1175, 3: 0.0374} | {b: (2.85 / (2 ** (b - 1) - 1)) ** 2 / 12 for b in (4, 5, 6, 8)}


def normal(rows: int = 3, groups: int = 200) -> torch.Tensor:
    return torch.randn(rows, groups * GROUP, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("name", ROUNDED)
def test_a_message_has_the_bits_it_says_and_loses_what_theory_says(name: str, hadamard: bool) -> None:
    values, under_test = normal(), wire(name, hadamard=hadamard)
    message = under_test.encode(values)
    assert message.dtype == torch.uint8
    assert message.shape[1] == values.shape[1] * under_test.bits / 8 + 2 * 200
    assert under_test.message_bytes(values.shape[1]) == message.shape[1]
    error = float((under_test.decode(message) - values).square().mean())
    assert error == pytest.approx(EXPECTED_ERROR[under_test.bits], rel=0.08)


@pytest.mark.parametrize("bits", range(1, 9))
def test_every_code_survives_packing(bits: int) -> None:
    codes = torch.randint(2**bits, (3, 2 * GROUP), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed = pack(codes, bits)
    assert packed.shape == (3, 2 * GROUP * bits // 8)
    assert torch.equal(unpack(packed, bits), codes)


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("name", ROUNDED)
def test_the_operations_that_a_gpu_does_give_the_same_bits(
    name: str, stochastic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_test = wire(name, stochastic=stochastic)

    def there_and_back() -> tuple[torch.Tensor, torch.Tensor]:
        message = under_test.encode(normal(), torch.Generator().manual_seed(1))
        return message, under_test.decode(message)

    on_cpu = there_and_back()
    monkeypatch.setattr(wire_module, "on_cpu", lambda tensor: False)
    assert all(torch.equal(one, other) for one, other in zip(there_and_back(), on_cpu, strict=True))


@pytest.mark.parametrize("groups", [1, 3, 8])
@pytest.mark.parametrize("name", ROUNDED)
def test_on_a_gpu_rows_of_a_message_end_at_whole_words_of_16_bytes(
    name: str, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_test, values = wire(name), torch.randn(3, groups * GROUP)
    plain = under_test.encode(values)
    assert torch.equal(under_test.encode(values, aligned=True), plain), "not on a CPU"
    monkeypatch.setattr(wire_module, "on_cpu", lambda tensor: False)
    message = under_test.encode(values, aligned=True)
    assert message.shape[1] % 16 == 0 and message.shape[1] - plain.shape[1] < 16
    assert torch.equal(under_test.decode(message), under_test.decode(plain))
    assert torch.equal(under_test.decode_all([message, message])[1], under_test.decode(plain))


def test_fp32_is_exact_and_bf16_is_torchs() -> None:
    values = normal()
    assert torch.equal(wire("fp32").decode(wire("fp32").encode(values)), values)
    assert torch.equal(wire("bf16").decode(wire("bf16").encode(values)), values.bfloat16().float())
    assert wire("bf16").bytes_per_value() == 2 and wire("fp32").bytes_per_value() == 4


@pytest.mark.parametrize(("name", "mantissa"), FLOATING.items())
def test_numbers_with_an_exponent_keep_their_mantissas_bits(name: str, mantissa: int) -> None:
    values, under_test = normal() * 1e-6, wire(name)  # as small as gradients are; fp16 itself ends at 6e-8
    message = under_test.encode(values)
    assert message.shape[1] == under_test.message_bytes(values.shape[1]) == values.shape[1] * under_test.bits // 8 + 400
    large = values.abs() > values.abs().amax() / 100
    worst = float(((under_test.decode(message) - values) / values)[large].abs().max())
    assert worst == pytest.approx(1 / (2 ** (mantissa + 1) + 1), rel=0.01)  # halfway between the first two numbers


def test_of_normal_values_fp16_loses_less_than_bf16_and_int8_less_than_fp8() -> None:
    values = normal()

    def lost(name: str) -> float:
        return float((wire(name).decode(wire(name).encode(values)) - values).norm() / values.norm())

    assert 7.5 < lost("bf16") / lost("fp16") < 9 and 3.5 < lost("fp8") / lost("int8") < 4.5


@pytest.mark.parametrize("name", [*ROUNDED, *FLOATING])
@pytest.mark.parametrize("scale", [0.0, 1e-15, 1e15, 1e25])  # squares of the last one overflow fp32
def test_extreme_scales(name: str, scale: float) -> None:
    values = normal() * scale
    decoded = wire(name).decode(wire(name).encode(values))
    assert torch.isfinite(decoded).all()
    assert (decoded - values).double().norm() <= 0.62 * values.double().norm()  # 0.36 of the energy is lost at 1 bit


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("name", WIRES)
def test_a_value_that_is_not_finite_is_seen_by_the_receiver(name: str, hadamard: bool, bad: float) -> None:
    values = normal(rows=1, groups=3)
    values[0, GROUP + 5] = bad
    decoded = wire(name, hadamard=hadamard).decode(wire(name, hadamard=hadamard).encode(values))
    assert not torch.isfinite(decoded[0, GROUP + 5])
    assert torch.isfinite(decoded[0, :GROUP]).all() and torch.isfinite(decoded[0, 2 * GROUP :]).all()


@pytest.mark.parametrize(("name", "step"), [("int4", 2.85 / 7), ("fp8", 1 / 4), ("fp16", 1 / 512)])
def test_stochastic_rounding_is_unbiased_and_nearest_rounding_is_not(name: str, step: float) -> None:
    """``step``: the distance of two levels, with a mantissa those between 2 and 4."""
    values = normal(rows=1, groups=2)

    def mean(under_test: Wire) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        decoded = [under_test.decode(under_test.encode(values, generator)) for _ in range(2000)]
        return torch.stack(decoded).mean(dim=0)

    assert (mean(wire(name, stochastic=True)) - values).abs().max() < 5 * step / 2 / math.sqrt(2000)
    assert (mean(wire(name)) - values).abs().max() > step / 4


def test_random_numbers_do_not_depend_on_the_scripts_default_type() -> None:
    values = torch.linspace(-1, 1, 1024).unsqueeze(0)
    own = [wire(name, stochastic=True).encode(values, torch.Generator().manual_seed(1)) for name in ("int8", "fp16")]
    torch.set_default_dtype(torch.bfloat16)
    try:
        for name, expected in zip(("int8", "fp16"), own, strict=True):
            found = wire(name, stochastic=True).encode(values, torch.Generator().manual_seed(1))
            assert torch.equal(found, expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_rotation_spreads_an_outlier_over_its_group() -> None:
    values = normal(rows=1, groups=1)
    values[0, 7] = 100.0
    others = torch.arange(GROUP) != 7

    def lost(under_test: Wire) -> float:
        return float((under_test.decode(under_test.encode(values)) - values)[0, others].square().mean())

    assert lost(wire("int4")) > 0.9  # one step is 14: all others become 0
    assert lost(wire("int4", hadamard=True)) < 0.9


@pytest.mark.parametrize(
    ("name", "most"), [("int5", 0.01), ("int4", 0.01), ("int3", 0.1), ("int2", 0.3), ("int1", 0.7)]
)
def test_the_rotation_loses_no_more_of_a_constant_group(name: str, most: float) -> None:
    under_test = wire(name, hadamard=True)
    values = torch.ones(1, GROUP)
    error = under_test.decode(under_test.encode(values)) - values
    assert error.square().mean() < most


def test_random_rounding_to_bf16_is_unbiased() -> None:
    """Of values at each quarter between two neighbours."""
    step = 2.0**-7  # of bf16 from 1 to 2
    for share in (0.25, 0.5, 0.75):
        values = torch.full((1, 1 << 16), 1 + share * step)
        rounded = wire("bf16", stochastic=True)
        found = rounded.decode(rounded.encode(values, torch.Generator().manual_seed(0)))
        assert abs(float(found.mean() - 1) / step - share) < 0.02
