"""The cluster fixtures for tests against a real API server."""

import sys
from pathlib import Path

import pytest

_TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(_TESTS)]

from served import Served, serve  # noqa: E402

from cluster import Cluster  # noqa: E402
from cluster.fixture import api_cluster  # noqa: E402

__all__ = ["api_cluster", "served"]


@pytest.fixture(scope="session")
def served(api_cluster: Cluster) -> Served:
    """RLHFJobs on a real API server."""
    return serve(api_cluster)
