"""The time limit of a test with real processes."""

from pathlib import Path

import pytest

LIMIT_SECONDS = 1800
"""Of a test with its fixtures, longer than the patience of several waits in it, on a machine many times slower than
any that it was written on: a wait that ends says what it was for, and this limit says nothing."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test of this folder that names no limit of its own this one."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LIMIT_SECONDS))
