"""Why pods are not what they should be, in sentences a user can act on.

Rule: pure. A sentence names the pod, what is wrong in the words of whoever said so, and what would help.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Final

from rlhf_api.job import RLHFJob
from rlhf_api.names import ExitCode, Group
from rlhf_operator.reconcile.pod import INIT_FAILED, End, Pod

IMAGE_REASONS: Final = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
)
CONFIG_REASONS: Final = frozenset(
    {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", INIT_FAILED}
)
SHOWN: Final = 3
"""Pods that are named; of more, the number is said."""
LINES_SHOWN: Final = 8
"""Lines of a log that are told."""
_KILLED: Final = 137
"""128 + SIGKILL."""
_MEANINGS: Final = {
    ExitCode.USAGE: "its settings or the manifest are wrong",
    ExitCode.USER_CODE: "the reward failed",
    ExitCode.BAD_MODEL: "a model folder is missing or corrupt",
    ExitCode.BAD_DATA: "the prompts cannot be read",
    ExitCode.STORAGE: "a checkpoint or the journal could not be written",
    ExitCode.ADDRESS_IN_USE: "its port is in use",
    ExitCode.RESTART: "it asked to be restarted",
}


def last_words(log: str) -> str:
    """The last line of a log: why a process ended, as it said itself."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def log_lines(pod: Pod) -> str:
    """The last lines of its log, to be read below a sentence that has the very last; empty when there are no others."""
    lines = pod.end.message.splitlines() if pod.end else []
    if len(lines) < 2:
        return ""
    return "\n  ".join([f"The last lines of the log of {pod.name}:", *lines[-LINES_SHOWN:]])


def how_it_ended(end: End) -> str:
    """`exit code 21 (a model folder is missing or corrupt): ...`"""
    if end.reason == "OOMKilled":
        return "it was killed for using more memory than its limit: raise resources.limits.memory in its pod template"
    if end.code is None:
        return f"{end.reason or 'the pod failed'}: {end.message}" if end.message else end.reason or "the pod failed"
    meaning = _MEANINGS.get(ExitCode(end.code)) if end.code in set(ExitCode) else None
    if end.code == _KILLED:
        meaning = "it was killed from outside"
    told = last_words(end.message)
    return f"exit code {end.code}" + (f" ({meaning})" if meaning else "") + (f": {told}" if told else "")


def troubles(job: RLHFJob, pods: Iterable[Pod], refusals: Mapping[str, str], now: datetime) -> list[str]:
    """What keeps pods from running, the gravest first."""
    listed = sorted(pods, key=lambda pod: (pod.group, pod.index))
    found = [_refused(refusals)] if refusals else []
    stuck = [pod for pod in listed if pod.stuck(now)]
    if stuck:
        found.append(_unschedulable(job, stuck))
    images = [pod for pod in listed if pod.waiting in IMAGE_REASONS]
    if images:
        words = images[0].waiting_message or images[0].waiting
        found.append(f"{_named(images)} cannot get the image ({words}): correct the image, or give imagePullSecrets")
    broken = [pod for pod in listed if pod.waiting in CONFIG_REASONS]
    if broken:
        words = broken[0].waiting_message or broken[0].waiting
        found.append(f"{_named(broken)} cannot be started ({broken[0].waiting}: {words})")
    for pod in [pod for pod in listed if pod.waiting == "CrashLoopBackOff" and pod.end][:SHOWN]:
        assert pod.end is not None
        found.append(f"{pod.name} keeps ending: {how_it_ended(pod.end)}")
    return found


def _refused(refusals: Mapping[str, str]) -> str:
    name, why = next(iter(sorted(refusals.items())))
    more = f" and {len(refusals) - 1} more" if len(refusals) > 1 else ""
    remedy = ": free quota in the namespace, or raise it" if "exceeded quota" in why else ""
    return f"{name}{more} cannot be created: {why}{remedy}"


def _unschedulable(job: RLHFJob, stuck: list[Pod]) -> str:
    group = stuck[0].group
    remedy = "add nodes, free some, or lower what the pods ask for"
    if group in (Group.GENERATION, Group.INFERENCE):
        remedy = f"add nodes, free some, or lower spec.{group}.replicas"
    elif group is Group.TRAINING and job.spec.training.gpus_per_replica:
        remedy = "add nodes with GPUs, or free some"
    return f"no node can take {_named(stuck)} ({stuck[0].unschedulable.rstrip('.')}): {remedy}"


def _named(pods: list[Pod]) -> str:
    names = ", ".join(pod.name for pod in pods[:SHOWN])
    return names if len(pods) <= SHOWN else f"{names} and {len(pods) - SHOWN} more"
