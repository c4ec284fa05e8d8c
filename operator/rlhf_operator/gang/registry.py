"""The registry of gang backends, by value of spec.scheduling.gang.mode.

A new backend is a class that follows `backend.GangBackend`, a `BackendKind`, its APIs in `apis.APIS`, and an entry
here.
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
    """How a backend is chosen and created."""

    make: Callable[[str], GangBackend]
    """Creates the backend for an apiVersion."""
    remedy: str
    """Step by which the administrator of the cluster adds its API."""
    scheduler: str | None = None
    """Scheduler of the pods for which Auto chooses this backend; None: Auto chooses it only if a job asks for it."""
    asked_by: Callable[[RLHFJob], str] = _nothing
    """Returns the part of a job that asks for the backend, as text. Auto prefers a backend that is asked for."""
    lacks: Callable[[RLHFJob], str] = _nothing
    """Returns the missing part of a job that names the backend, as text; empty if nothing is missing."""
    queue: QueueApi | None = None
    """Reads its queue; None for a backend without one."""


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
    """Return the queue whose object of a job is `kind`, with its apiVersion; None if there is none."""
    return next((api for _, api in queue_apis() if api.reads(kind)), None)
