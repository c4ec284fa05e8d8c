"""The cluster fixtures for tests against a real API server."""

import pytest
from tests.cluster import Cluster
from tests.cluster.fixture import api_cluster
from tests.support.manifests.served_definition import ServedDefinition, serve

__all__ = ["api_cluster", "served"]


@pytest.fixture(scope="session")
def served(api_cluster: Cluster) -> ServedDefinition:
    """Return RLHFJobs on a real API server."""
    return serve(api_cluster)
