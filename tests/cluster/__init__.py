"""A real Kubernetes cluster for tests: etcd, API server, controllers, scheduler, kubelet, containers, DNS.

Owns everything that starts, watches and removes such a cluster; knows nothing of the operator under test. Rule: links
and control groups have names derived from the instance's slot, which are written to the slot's state file first, so
that a later run can remove them. It must never end a process or remove a link that is not in such a file.
"""

from tests.cluster.cluster import Cluster, ClusterError

__all__ = ["Cluster", "ClusterError"]
