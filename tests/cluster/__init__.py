"""A real Kubernetes cluster for tests: etcd, API server, controllers, scheduler, kubelet, containers, DNS.

Owns everything that starts, watches and removes such a cluster; knows nothing of the operator under test. Rule: every
created resource has a name derived from the instance's slot and is written to the slot's state file first, so that a
later run can remove it. It must never end a process or remove a link that is not in such a file.
"""

from tests.cluster.cluster import Cluster, ClusterError

__all__ = ["Cluster", "ClusterError"]
