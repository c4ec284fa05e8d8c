"""The faults of a job under chaos, picked from a seed.

Rule: pure. The same seed and count give the same list, and a longer list begins with the shorter one. Every kind with a
weight comes once before any repeats, so a list of sixteen has them all. After that, the frequency of kinds is like that
in a cluster: pods end every day, etcd rarely. This module does not know how a fault is carried out.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Kind(StrEnum):
    """Kinds of faults; the values are printed."""

    DELETE = "delete a pod"
    FORCE = "delete a pod with grace 0"
    EVICT = "evict a pod"
    KILL = "kill a container's process"
    CUT = "cut a pod's network"
    KUBELET = "stop the kubelet for an iteration"
    API_SERVER = "restart the API server"
    ETCD = "restart etcd"
    OPERATOR = "kill the operator and start another"
    STANDBY = "end the operator beside a standby"
    SECRET = "delete the Secret and a pod that mounts it"
    SERVICE = "delete a Service"
    CONFIG_MAP = "delete the ConfigMap"
    NETWORK_POLICY = "delete the NetworkPolicy"
    SUSPEND = "suspend and resume"
    RESIZE = "resize generation 1 -> 2 -> 1"
    OUT_OF_MEMORY = "take a container's memory away"
    DRAIN = "drain the node"


WEIGHTS: Final = {
    Kind.DELETE: 5,
    Kind.FORCE: 3,
    Kind.EVICT: 3,
    Kind.KILL: 6,
    Kind.CUT: 3,
    Kind.KUBELET: 1,
    Kind.API_SERVER: 2,
    Kind.ETCD: 1,
    Kind.OPERATOR: 3,
    Kind.STANDBY: 2,
    Kind.SECRET: 1,
    Kind.SERVICE: 2,
    Kind.CONFIG_MAP: 1,
    Kind.NETWORK_POLICY: 1,
    Kind.SUSPEND: 2,
    Kind.RESIZE: 2,
}
"""Relative frequency of kinds, once all have come. Other kinds occur only in explicit lists."""

WORKERS: Final = ("coordinator", "generation-0", "inference-0", "training-0", "training-1")
"""Pods of the job, without the job's name."""
SIGNALS: Final = ("SIGTERM", "SIGKILL")
VICTIMS: Final[dict[Kind, Sequence[str]]] = {
    **dict.fromkeys((Kind.DELETE, Kind.FORCE, Kind.EVICT, Kind.KILL, Kind.CUT), WORKERS),
    **dict.fromkeys((Kind.KUBELET, Kind.API_SERVER, Kind.ETCD, Kind.STANDBY), SIGNALS),
    Kind.OPERATOR: ("SIGKILL",),
    Kind.SECRET: ("secret/{job}-certificates",),
    Kind.SERVICE: ("service/{job}", "service/{job}-coordinator"),
    Kind.CONFIG_MAP: ("configmap/{job}-job",),
    Kind.NETWORK_POLICY: ("networkpolicy/{job}",),
    Kind.SUSPEND: ("{job}",),
    Kind.RESIZE: ("{job}",),
    Kind.OUT_OF_MEMORY: WORKERS,
    Kind.DRAIN: ("{job}",),
}
"""Kind -> possible victims, or signals."""
LONGEST_CALM: Final = 2.0
"""Longest time in seconds from the job's recovery to the next fault."""
CUT_SECONDS: Final = (1.0, 12.0)
"""Seconds of a cut network: from a hiccup to longer than the interval of keep-alives, and well below the 30 s of a lost
worker."""


@dataclass(frozen=True)
class Fault:
    """One fault."""

    kind: Kind
    victim: str
    """Worker, signal or object; `{job}` stands for the job's name."""
    calm: float
    """Seconds to wait before it, so that it hits any stage of an iteration."""
    seconds: float = 0.0
    """Duration, if no fact determines it."""


def faults(seed: int, count: int) -> list[Fault]:
    """Return the first `count` faults of a seed."""
    rng = random.Random(seed)
    kinds = list(WEIGHTS)
    rng.shuffle(kinds)
    weights = list(WEIGHTS.values())
    result = []
    for number in range(count):
        kind = kinds[number] if number < len(kinds) else rng.choices(list(WEIGHTS), weights)[0]
        victim, calm, seconds = rng.choice(VICTIMS[kind]), rng.uniform(0, LONGEST_CALM), rng.uniform(*CUT_SECONDS)
        result.append(Fault(kind, victim, round(calm, 1), round(seconds, 1) if kind is Kind.CUT else 0.0))
    return result


OF_AN_ENGINE: Final = (
    Fault(Kind.OUT_OF_MEMORY, "generation-0", 0.6),
    Fault(Kind.KILL, "coordinator", 1.2),
    Fault(Kind.DRAIN, "{job}", 0.3),
    Fault(Kind.FORCE, "coordinator", 0.9),
)
"""Faults that an engine must survive: loss of its process, of its pod, and of the coordinator."""


@dataclass(frozen=True)
class Due:
    """Expected counts of `status.restarts`."""

    failures: int
    disruptions: range
    """Range, because a pod deleted with grace 0 is counted only if it is observed while terminating."""

    def met(self, failures: int, disruptions: int) -> bool:
        """Return whether the counts are as expected."""
        return failures == self.failures and disruptions in self.disruptions


def due(done: Iterable[Fault]) -> Due:
    """Return the expected counts: a killed container is a failure, a lost pod is a disruption, all else counts as
    nothing.
    """
    counts = Counter(item.kind for item in done)
    certain = counts[Kind.DELETE] + counts[Kind.EVICT] + counts[Kind.SECRET] + counts[Kind.DRAIN] * len(WORKERS)
    return Due(counts[Kind.KILL] + counts[Kind.OUT_OF_MEMORY], range(certain, certain + counts[Kind.FORCE] + 1))
