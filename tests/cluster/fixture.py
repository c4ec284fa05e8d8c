"""pytest fixtures: one cluster per level and session; its logs are stored if a test of the session failed meanwhile.

A conftest.py imports api_cluster, control_plane_cluster or node_cluster from here. Rule: a shared cluster is never
restarted under other tests; a test that breaks components creates its own Cluster.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.cluster.cluster import Cluster

NO_ROOT = "level 'node' makes namespaces, mounts and links and needs root"


@pytest.fixture(scope="session")
def api_cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Yield etcd and the API server: schemas, CEL, RBAC, server-side apply; no controllers, no garbage collection."""
    with own_cluster(request, level="api") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def control_plane_cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Yield a cluster with controllers and scheduler too; pods run on kwok nodes that a test adds."""
    with own_cluster(request, level="control-plane") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def node_cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Yield a cluster with one real node with 8 advertised GPUs; skipped without root."""
    with own_cluster(request, level="node") as cluster:
        yield cluster


@contextmanager
def own_cluster(request: pytest.FixtureRequest, **choices: Any) -> Iterator[Cluster]:
    """Yield a cluster with these settings; skipped if it needs root and there is none."""
    if choices["level"] == "node" and os.geteuid() != 0:
        pytest.skip(NO_ROOT)
    failed_before = request.session.testsfailed
    cluster = Cluster(**choices).start()
    try:
        yield cluster
    finally:
        cluster.stop(failed=request.session.testsfailed > failed_before)
