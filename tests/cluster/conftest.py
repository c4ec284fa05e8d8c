"""The fixtures of the cluster's own tests."""

from cluster.fixture import api_cluster, control_plane_cluster, node_cluster

__all__ = ["api_cluster", "control_plane_cluster", "node_cluster"]
