"""Who is of a gang: how many pods must fit at once, what they ask for, and which scheduler they name.

Rule: pure. The minimum is what an iteration can not do without: the coordinator, every training rank (in whose
pod it may be), one generation worker, and one inference worker where the job has any. The rest is elastic and joins
when there is room (docs/decisions/0004-a-gang-is-what-an-iteration-needs.md).
"""

import math
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any, Final

from rlhf_api.job import RLHFJob
from rlhf_api.names import Group
from rlhf_operator.manifests.render import Images, pod, workers

Json = dict[str, Any]

DEFAULT_SCHEDULER: Final = "default-scheduler"
_BINARY: Final = {f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)}
_DECIMAL: Final = {letter: Decimal(1000) ** power for power, letter in enumerate("kMGTPE", 1)}
_SMALL: Final = {"n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3")}
_SUFFIXES: Final[Mapping[str, Decimal]] = {**_BINARY, **_DECIMAL, **_SMALL}


def counts(job: RLHFJob) -> dict[Group, int]:
    """Pods of each group that has any, the coordinator first."""
    return {Group.COORDINATOR: 1} | {group: count for group, count, _ in workers(job) if count}


def minimum(job: RLHFJob) -> dict[Group, int]:
    """Pods of each group without which the job can not begin."""
    ranks = {job.spec.rank_group: job.spec.training.ranks}
    return {group: min(count, ranks.get(group, 1)) for group, count in counts(job).items()}


def min_count(job: RLHFJob) -> int:
    """Pods that must fit at once."""
    return sum(minimum(job).values())


def min_resources(job: RLHFJob) -> dict[str, str]:
    """What the minimum asks for in sum, by resource."""
    total: dict[str, Decimal] = {}
    for group, count in minimum(job).items():
        for name, amount in requests(pod(job, group, 0, Images())).items():
            total[name] = total.get(name, Decimal(0)) + count * amount
    return {name: written(amount) for name, amount in sorted(total.items())}


def requests(manifest: Json) -> dict[str, Decimal]:
    """What one pod asks for: all its containers, or its largest init container where that is more."""
    spec = manifest["spec"]
    found: dict[str, Decimal] = {}
    for container in spec["containers"]:
        for name, amount in _asked(container).items():
            found[name] = found.get(name, Decimal(0)) + amount
    for container in spec.get("initContainers") or []:
        for name, amount in _asked(container).items():
            found[name] = max(found.get(name, Decimal(0)), amount)
    return found


def schedulers(job: RLHFJob) -> set[str]:
    """Schedulers that the pod templates name."""
    templates = (job.spec.coordinator, job.spec.generation, job.spec.inference, job.spec.training)
    found = ((each.template.get("spec") or {}).get("schedulerName") for each in templates)
    return {str(name) for name in found if name}


def scheduler(job: RLHFJob, default: str | None) -> str | None:
    """The one scheduler of all pods: that of the templates, else `default`; None leaves it to the cluster."""
    return next(iter(schedulers(job)), default)


def amount(text: object) -> Decimal:
    """A quantity as Kubernetes writes it: 500m, 1Gi, 2, 1e3. Raises ValueError."""
    given = str(text).strip()
    suffix = next((each for each in _SUFFIXES if given.endswith(each)), "")
    try:
        return Decimal(given.removesuffix(suffix)) * _SUFFIXES.get(suffix, Decimal(1))
    except ArithmeticError as error:
        raise ValueError(f"{given!r} is not a quantity such as 500m, 2 or 1Gi") from error


def written(value: Decimal) -> str:
    """The shortest quantity that is no less."""
    return str(int(value)) if value == int(value) else f"{math.ceil(value * 1000)}m"


def told(found: Mapping[Group, int]) -> str:
    """`1 coordinator, 2 generation and 4 training pods`."""
    parts = [f"{count} {group.value}" for group, count in found.items()]
    return f"{', '.join(parts[:-1])} and {parts[-1]} pods" if len(parts) > 1 else f"{parts[0]} pod"


def _asked(container: Mapping[str, Any]) -> dict[str, Decimal]:
    resources = container.get("resources") or {}
    # A limit without a request is the request, as the API server has it.
    asked: Iterable[tuple[str, Any]] = ((resources.get("limits") or {}) | (resources.get("requests") or {})).items()
    return {name: amount(value) for name, value in asked}
