"""Whose fault it is when a pod failed as a whole, by the word and the words that the kubelet puts into its status.

What somebody else did to a pod that ran (preemption, drain, pressure on the node, a lost node) has the condition
DisruptionTarget since Kubernetes 1.26. Without it are: a pod that its node refused before anything of it ran, which is
the node's matter as long as the reason is the node's state and not what the pod asks for; and a pod that was evicted or
ended for what it did itself (an emptyDir's sizeLimit, limits of ephemeral storage, its own deadline).
Rule: pure; a reason that nobody knows is the pod's own, so that it counts and cannot go on for ever.
"""

from typing import Final

GONE: Final = frozenset({"NodeLost", "NodeShutdown", "Preempting", "Shutdown", "Terminated"})
"""Reasons of pods that ran; the condition goes with most of them."""
REFUSED: Final = frozenset(
    {
        "InvalidNodeInfo",
        "NodeAffinity",
        "NodeName",
        "NodePorts",
        "TaintToleration",
        "TopologyAffinityError",
        "UnexpectedAdmissionError",
        "UnexpectedPredicateFailureType",
        "UnknownReason",
        "VolumeAttachmentLimitExceeded",
    }
)
"""Reasons of the kubelet's admission that are the node's state: taken meanwhile, labelled anew, a sick device plugin.
SysctlForbidden, AppArmor, PodOSNotSupported and their like are no node's fault, and no other node of its kind helps."""
LACKING: Final = "OutOf"
"""Beginning of such a reason: OutOfcpu, OutOfnvidia.com/gpu."""
EVICTED: Final = "Evicted"
PRESSURE: Final = "The node had condition: ["
"""In the words by which a node under pressure refuses a pod, with the reason of an eviction."""


def disrupted(reason: str, message: str) -> bool:
    """A failed pod without the condition DisruptionTarget was not the fault of what ran in it."""
    if reason == EVICTED:
        return PRESSURE in message
    return reason in GONE or reason in REFUSED or reason.startswith(LACKING)
