"""The gang backends that there are: one entry for each value of spec.scheduling.gang.mode that names one.

A new backend is a module with a class that follows `backend.GangBackend` and a `BackendKind`, the APIs that it needs in
`apis.APIS`, and its entry here. tests/unit/operator/gang/test_gang_contract.py holds every entry to the contract.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from rlhf_api.job import RLHFJob
from rlhf_operator.gang import coscheduling, kueue, native, volcano
from rlhf_operator.gang.apis import COSCHEDULING, KUEUE, NATIVE, VOLCANO
from rlhf_operator.gang.backend import GangBackend, QueueApi
from rlhf_operator.gang.kueue_queue import KueueApi
from rlhf_operator.gang.members import DEFAULT_SCHEDULER


def _nothing(job: RLHFJob) -> str:
    return ""


@dataclass(frozen=True)
class BackendKind:
    """How a backend is chosen and made."""

    make: Callable[[str], GangBackend]
    """The backend for an apiVersion."""
    remedy: str
    """What whoever runs the cluster does to have its API."""
    scheduler: str | None = None
    """Auto takes it for pods of this scheduler."""
    asked_by: Callable[[RLHFJob], str] = _nothing
    """What of a job asks for it, in words; Auto takes it first for a job of which this is not empty."""
    lacks: Callable[[RLHFJob], str] = _nothing
    """What a job that names it does not have; empty when it has everything."""
    queue: QueueApi | None = None
    """How its queue is read, where its backend is a `QueueingBackend`."""


BACKENDS: Final[Mapping[str, BackendKind]] = {
    NATIVE: BackendKind(
        native.NativeBackend,
        "enable the feature gates GenericWorkload and GangScheduling and the API (--runtime-config)",
        scheduler=DEFAULT_SCHEDULER,
    ),
    KUEUE: BackendKind(
        kueue.KueueBackend, "install Kueue", asked_by=kueue.asked_by, lacks=kueue.lacks, queue=KueueApi()
    ),
    VOLCANO: BackendKind(volcano.VolcanoBackend, "install Volcano", scheduler=volcano.SCHEDULER),
    COSCHEDULING: BackendKind(
        coscheduling.CoschedulingBackend,
        "install the scheduler-plugins with coscheduling",
        scheduler=coscheduling.SCHEDULER,
    ),
}
"""Mode -> backend."""


def queue_apis() -> Iterator[tuple[str, QueueApi]]:
    """Yield (mode, API) of every backend that has a queue."""
    for mode, kind in BACKENDS.items():
        if kind.queue is not None:
            yield mode, kind.queue


def queue_api_of(kind: str) -> QueueApi | None:
    """Return the queue that knows jobs by objects of `kind`, named with its apiVersion; None: no queue does."""
    return next((api for _, api in queue_apis() if api.reads(kind)), None)
