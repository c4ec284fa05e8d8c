"""Rules of `spec.devices`, such as: sizes that it chooses are left out, and the devices hold what is fixed."""

from collections.abc import Iterator
from typing import Any, Final

from rlhf_api.algorithms import graph_of
from rlhf_api.device_sizes import device_use
from rlhf_api.job import RLHFJob, RLHFJobSpec
from rlhf_api.job.devices import SizeGroup
from rlhf_api.job.groups import TrainingParallelism
from rlhf_api.job.scheduling import QUEUE_LABEL
from rlhf_api.problems import Problem

_FIELD: Final = "spec.devices"
_COUNT: Final = f"{_FIELD}.count"


def device_problems(job: RLHFJob) -> Iterator[Problem]:
    """Yield problems of fields that contradict `spec.devices`."""
    spec = job.spec
    devices = spec.devices
    if devices is None:
        return
    graph = graph_of(spec)
    if not graph.generates:
        message = f"divides devices between generation and training, and algorithm {graph.algorithm} generates nothing"
        yield Problem(_FIELD, None, f"{message}: remove it, and write the sizes")
        return
    yield from _queues(job)
    found = [problem for group, *size in _sizes(spec) if group in devices.chosen for problem in _written(group, *size)]
    yield from found
    least = fewest_devices(spec)
    if devices.count < least and not found:
        sizes = f"the sizes in {_FIELD}.fixed" if devices.fixed else "one worker of each needed group"
        yield Problem(_COUNT, devices.count, f"must be at least {least} for {sizes}")
    if devices.replan == "Auto" and spec.deterministic and "Training" not in devices.fixed:
        why = "would change the order of sums at a moment that depends on measured times"
        message = f"{why}, and spec.deterministic is true: add Training to {_FIELD}.fixed, or use Report"
        yield Problem(f"{_FIELD}.replan", devices.replan, message)


def _queues(job: RLHFJob) -> Iterator[Problem]:
    """Yield a problem for each field that asks a queue or a scheduler for all pods at once."""
    why = f"is not available with {_FIELD}, whose pods are unknown before the coordinator has planned"
    mode = job.spec.scheduling.gang.mode
    if mode not in ("Disabled", "Auto"):
        yield Problem("spec.scheduling.gang.mode", mode, f"{why}: use Disabled, or write the sizes")
    queue = (job.metadata.get("labels") or {}).get(QUEUE_LABEL)
    if queue:
        yield Problem("metadata.labels", {QUEUE_LABEL: queue}, f"a queue {why}: remove the label, or write the sizes")


def fewest_devices(spec: RLHFJobSpec) -> int:
    """Return the devices that fixed sizes use, with one process of each other group that every plan has."""
    fixed = spec.devices.fixed if spec.devices is not None else ()
    use = device_use(spec, spec.generation.parallelism.tensor)
    generation = (spec.generation.replicas if "Generation" in fixed else 1) * use.generation
    inference = spec.inference.replicas * use.inference if "Inference" in fixed else 0
    ranks = spec.training.ranks if "Training" in fixed else 1
    return generation + inference + (ranks * use.training if _is_dedicated(spec) else 0)


def _is_dedicated(spec: RLHFJobSpec) -> bool:
    """Return whether every plan has training ranks on devices of their own."""
    return spec.placement == "Dedicated" and spec.devices is not None and "Placement" in spec.devices.fixed


def _sizes(spec: RLHFJobSpec) -> Iterator[tuple[SizeGroup, str, Any, Any]]:
    """Yield (group, field, value, default) of the sizes that must be left out if they are chosen."""
    yield "Placement", "spec.placement", spec.placement, "Dedicated"
    yield "Generation", "spec.generation.replicas", spec.generation.replicas, 1
    yield "Generation", "spec.generation.parallelism.tensor", spec.generation.parallelism.tensor, 1
    yield "Inference", "spec.inference.replicas", spec.inference.replicas, 1
    for name, field in TrainingParallelism.model_fields.items():
        path = f"spec.training.parallelism.{field.alias}"
        yield "Training", path, getattr(spec.training.parallelism, name), field.default


def _written(group: SizeGroup, field: str, value: Any, default: Any) -> Iterator[Problem]:
    if value != default:
        yield Problem(field, value, f"is chosen with {_FIELD}: leave it out, or add {group} to {_FIELD}.fixed")
