"""Options of the whole test run."""

import math
import time

import pytest
import torch

STARTED = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests that are marked slow")
    parser.addoption(
        "--slow-minutes",
        type=float,
        default=math.inf,
        help="with --slow: begin none of them later than so many minutes",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("--slow-minutes")
    if "slow" in item.keywords and time.monotonic() - STARTED > 60 * minutes:
        pytest.skip(f"slow: the {minutes:g} minutes of --slow-minutes are over")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="slow: give --slow to run it"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """A test that fails by chance tells nothing."""
    torch.manual_seed(0)
