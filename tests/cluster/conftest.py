"""The fixtures of the cluster's own tests, and their time limit."""

from pathlib import Path

import pytest
from tests.cluster.fixture import api_cluster, control_plane_cluster, node_cluster
from tests.cluster.operating.job_fixture import cluster, namespace, operator, seen

__all__ = ["api_cluster", "cluster", "control_plane_cluster", "namespace", "node_cluster", "operator", "seen"]

LIMIT_SECONDS = 5400
"""Time limit in seconds of a test with its fixtures; longer than several waits in it. A wait that times out names its
condition, and this limit does not.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Set this limit for every test of this folder without its own."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LIMIT_SECONDS))
