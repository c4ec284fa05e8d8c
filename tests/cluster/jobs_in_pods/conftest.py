"""The operator that most tests of jobs in pods share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.operator_process import OperatorProcess, beside_node


@pytest.fixture
def operator(node_cluster: Cluster) -> Iterator[OperatorProcess]:
    """Yield the operator beside the node, which finds this machine's environment."""
    with beside_node(node_cluster, "--no-leader-election") as process:
        yield process
