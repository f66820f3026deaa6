"""The learning rate of each iteration that EDGC reads from Megatron's arguments."""

from argparse import Namespace

import pytest

from megatron.edgc.run import learning_rate

ARGUMENTS = {
    "train_samples": None,
    "lr": 1e-3,
    "min_lr": 1e-4,
    "lr_warmup_init": 0.0,
    "lr_warmup_fraction": None,
    "lr_decay_style": "cosine",
    "lr_wsd_decay_style": None,
    **{f"lr_{name}_{unit}": None for name in ("decay", "wsd_decay") for unit in ("iters", "samples")},
    "lr_warmup_iters": 0,
    "lr_warmup_samples": 0,
}


@pytest.mark.parametrize("given", [{"lr": None}, {"lr_decay_style": "WSD"}, {"lr_warmup_iters": 200}])
def test_a_script_without_such_a_schedule_has_no_known_rate(given: dict[str, object]) -> None:
    assert learning_rate(Namespace(**{**ARGUMENTS, **given}), 200) is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"lr_warmup_iters": 20}, {10: 5e-4, 20: 1e-3, 110: 5.5e-4, 200: 1e-4}),
        ({"lr_decay_style": "linear", "lr_decay_iters": 100}, {0: 1e-3, 50: 5.5e-4, 150: 1e-4}),
        ({"lr_warmup_fraction": 0.1, "lr_decay_style": "constant"}, {10: 5e-4, 20: 1e-3, 199: 1e-3}),
        # 200 iterations of 8 samples
        ({"train_samples": 1600, "lr_warmup_samples": 160}, {10: 5e-4, 110: 5.5e-4, 200: 1e-4}),
        (
            {"lr_decay_style": "WSD", "lr_wsd_decay_style": "linear", "lr_wsd_decay_iters": 50},
            {0: 1e-3, 150: 1e-3, 175: 5.5e-4, 200: 1e-4},
        ),
    ],
)
def test_the_rate_is_that_of_megatrons_scheduler(given: dict[str, object], expected: dict[int, float]) -> None:
    rate = learning_rate(Namespace(**{**ARGUMENTS, **given}), 200)
    assert rate is not None
    assert {iteration: rate(iteration) for iteration in expected} == pytest.approx(expected)
