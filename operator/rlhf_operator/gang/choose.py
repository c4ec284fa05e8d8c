"""Which backend places a job, by what it asks for and what the cluster serves.

Rule: pure. What is asked for by name and can not be had is a problem in words, never silently left out: a job that
believes in its gang and has none holds GPUs for ever.
"""

from collections.abc import Callable, Mapping
from typing import Final

from rlhf_api.conditions import PlannedReason
from rlhf_api.job import RLHFJob
from rlhf_api.job.scheduling import QUEUE_LABEL
from rlhf_operator.gang import coscheduling, volcano
from rlhf_operator.gang.apis import APIS, COSCHEDULING, KUEUE, NATIVE, VOLCANO, Served
from rlhf_operator.gang.backend import GangBackend, GangChoice
from rlhf_operator.gang.coscheduling import CoschedulingBackend
from rlhf_operator.gang.kueue import KueueBackend, queue_of
from rlhf_operator.gang.members import DEFAULT_SCHEDULER, schedulers
from rlhf_operator.gang.native import NativeBackend
from rlhf_operator.gang.volcano import VolcanoBackend

_FIELD: Final = "spec.scheduling.gang.mode"
_MAKE: Final[Mapping[str, Callable[[str], GangBackend]]] = {
    NATIVE: NativeBackend,
    KUEUE: KueueBackend,
    VOLCANO: VolcanoBackend,
    COSCHEDULING: CoschedulingBackend,
}
_BY_SCHEDULER: Final = {volcano.SCHEDULER: VOLCANO, coscheduling.SCHEDULER: COSCHEDULING}
_TO_GET: Final = {
    NATIVE: "enable the feature gates GenericWorkload and GangScheduling and the API (--runtime-config)",
    KUEUE: "install Kueue",
    VOLCANO: "install Volcano",
    COSCHEDULING: "install the scheduler-plugins with coscheduling",
}


def choose(job: RLHFJob, served: Served) -> GangChoice:
    """The backend of a job on a cluster."""
    mode, named = job.spec.scheduling.gang.mode, schedulers(job)
    if mode not in ("Disabled", "Auto") and len(named) > 1:
        return GangChoice(problem=_two(named), reason=PlannedReason.INVALID)
    if mode == "Disabled":
        return GangChoice()
    if mode == "Auto":
        return _auto(job, served, named)
    version = served.version(mode)
    if version is None:
        return GangChoice(problem=_lacking(mode, served))
    if mode == KUEUE and queue_of(job) is None:
        told = f"{_FIELD}: {mode}: needs the label {QUEUE_LABEL}: set it to the name of a LocalQueue of the namespace"
        return GangChoice(problem=told, reason=PlannedReason.INVALID)
    return GangChoice(_MAKE[mode](version))


def _auto(job: RLHFJob, served: Served, named: set[str]) -> GangChoice:
    queue = queue_of(job)
    if queue is not None and (version := served.version(KUEUE)) is not None:
        return (
            GangChoice(KueueBackend(version))
            if len(named) < 2
            else GangChoice(problem=_two(named), reason=PlannedReason.INVALID)
        )
    note = ""
    if queue is not None:
        note = f"the label {QUEUE_LABEL}: {queue} has no effect: {_why(KUEUE, served)}"
    if len(named) > 1:
        return GangChoice(note=note)
    [name] = named or {DEFAULT_SCHEDULER}
    mode = NATIVE if name == DEFAULT_SCHEDULER else _BY_SCHEDULER.get(name)
    if mode is None or (version := served.version(mode)) is None:
        return GangChoice(note=note)
    return GangChoice(_MAKE[mode](version), note=note)


def _lacking(mode: str, served: Served) -> str:
    return f"{_FIELD}: {mode}: {_why(mode, served)}, or use Auto"


def _why(mode: str, served: Served) -> str:
    if mode in served.off:
        value = f"scheduling.{mode.lower()}"
        return f"this operator may not use it: set {value}: true in the values of its chart"
    wanted = " or ".join(version for version, _ in APIS[mode])
    return f"the cluster does not serve {wanted}: {_TO_GET[mode]}"


def _two(named: set[str]) -> str:
    listed = ", ".join(sorted(named))
    return f"spec.*.template.spec.schedulerName: {listed}: one gang has one scheduler: name the same in all templates"
