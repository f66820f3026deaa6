"""Options of the whole test run."""

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests that are marked slow")


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
