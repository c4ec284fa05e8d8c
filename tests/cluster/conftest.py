"""The fixtures of the cluster's own tests."""

from tests.cluster.fixture import api_cluster, control_plane_cluster, node_cluster
from tests.cluster.job_fixture import cluster, namespace, operator, seen

__all__ = ["api_cluster", "cluster", "control_plane_cluster", "namespace", "node_cluster", "operator", "seen"]
