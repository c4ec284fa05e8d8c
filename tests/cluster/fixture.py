"""pytest fixtures: one cluster per level and session, its logs kept when a test of the session failed meanwhile.

A conftest.py takes them by `from cluster.fixture import api_cluster, control_plane_cluster, node_cluster`. The rule: a
shared cluster is never restarted under other tests; a test that breaks components makes a Cluster of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from .cluster import Cluster
from .settings import Level

NO_ROOT = "level 'node' makes namespaces, mounts and links and needs root"


@pytest.fixture(scope="session")
def api_cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """etcd and the API server: schemas, CEL, RBAC, server-side apply; no controllers, no garbage collection."""
    with _running(request, "api") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def control_plane_cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Controllers and scheduler too; pods run on kwok nodes that a test adds."""
    with _running(request, "control-plane") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def node_cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """One real node with 8 GPUs advertised; skipped without root."""
    if os.geteuid() != 0:
        pytest.skip(NO_ROOT)
    with _running(request, "node") as cluster:
        yield cluster


@contextmanager
def _running(request: pytest.FixtureRequest, level: Level) -> Iterator[Cluster]:
    failed_before = request.session.testsfailed
    cluster = Cluster(level=level).start()
    try:
        yield cluster
    finally:
        cluster.stop(failed=request.session.testsfailed > failed_before)
