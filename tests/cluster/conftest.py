"""The fixtures of the cluster's own tests, and how long one of these tests may take at all."""

from pathlib import Path

import pytest
from tests.cluster.fixture import api_cluster, control_plane_cluster, node_cluster
from tests.cluster.operating.job_fixture import cluster, namespace, operator, seen

__all__ = ["api_cluster", "cluster", "control_plane_cluster", "namespace", "node_cluster", "operator", "seen"]

LIMIT_SECONDS = 5400
"""Of a test with its fixtures, longer than the patience of several waits in it: a wait that ends says what it was for,
and this limit says nothing."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test of this folder that names no limit of its own this one."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LIMIT_SECONDS))
