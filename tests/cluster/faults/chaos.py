"""What happens to a job under chaos: faults picked by a seed.

Rule: pure. The same seed and count give the same list, and a longer list begins with the shorter one. Every kind comes
once before any comes again, so a list of sixteen has them all; after that, kinds come as often as they do in a
cluster: pods end every day, etcd seldom. Nothing here knows how a fault is carried out.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Kind(StrEnum):
    """What is done; the words are those that are printed."""

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
    SECRET = "delete the Secret"
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
"""How often each comes, beside the others, once all have come. What is not here comes where a list names it."""

WORKERS: Final = ("coordinator", "generation-0", "inference-0", "training-0", "training-1")
"""Pods of the job, by what follows the job's name."""
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
"""Kind -> what it may be done to, or the signal by which."""
LONGEST_CALM: Final = 2.0
"""Seconds from the job being at work again to the next fault, at most: about two iterations of the tiny job."""
CUT_SECONDS: Final = (1.0, 12.0)
"""How long a network is cut: from a hiccup to longer than any keep-alive, and well below the 30 s of a lost worker."""


@dataclass(frozen=True)
class Fault:
    """One of them."""

    kind: Kind
    victim: str
    """Worker, signal or object; `{job}` stands for the job's name."""
    calm: float
    """Seconds to wait before it, so that it meets any stage of an iteration."""
    seconds: float = 0.0
    """How long it lasts, where that is not said by facts."""


def faults(seed: int, count: int) -> list[Fault]:
    """The first `count` faults of a seed."""
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
"""What an engine has to live through: its own process and its pod are lost, and whoever knows of its samples. All else
that happens to a job happens outside of its engine, whichever that is."""


@dataclass(frozen=True)
class Due:
    """What `status.restarts` has to say."""

    failures: int
    disruptions: range
    """Of a pod that is deleted with grace 0 nothing is left to be counted, unless it is seen on its way out."""

    def met(self, failures: int, disruptions: int) -> bool:
        """The counts are right."""
        return failures == self.failures and disruptions in self.disruptions


def due(done: Iterable[Fault]) -> Due:
    """What must be counted after these: a killed container is a failure, a lost pod is not, the rest is nothing."""
    counts = Counter(item.kind for item in done)
    certain = counts[Kind.DELETE] + counts[Kind.EVICT] + counts[Kind.DRAIN] * len(WORKERS)
    return Due(counts[Kind.KILL] + counts[Kind.OUT_OF_MEMORY], range(certain, certain + counts[Kind.FORCE] + 1))
