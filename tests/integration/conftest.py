"""The time limit of a test with real processes."""

from pathlib import Path

import pytest

LIMIT_SECONDS = 1800
"""Seconds for a test with its fixtures; longer than several waits in it on a machine many times slower than ours. A
wait that times out names its condition, and this limit does not.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Set this limit for every test of this folder without its own."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LIMIT_SECONDS))
