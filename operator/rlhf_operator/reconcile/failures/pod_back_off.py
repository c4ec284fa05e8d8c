"""How long a pod of the job waits before it is made again: the more often in a row it ended, the longer.

A pod is known by its name, which is its group and index. Whatever ended it counts (a failure, a disruption, a request,
a restart of its group), for what makes pods in a circle harms the node, the API server and the job alike. The first
replacement is made at once; the following ones BASE after the pod before was made, then twice as long each time, to
LONGEST. A pod that ran RAN_WELL long begins anew, and so does one whose template is another one by now, as that may be
the cure. So a pod is made at most 7 times in RAN_WELL, and 12 times an hour when none of them runs that long.
Rule: pure. Counted from the creation of a pod and kept in `status.restarts.backOff`, so that neither a restart of the
operator nor a slow node changes it; a pod's end is entered once, with the write that accounts for it.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from rlhf_common.names import Group
from rlhf_operator.reconcile.observed.observed_pod import ObservedPod
from rlhf_operator.reconcile.timestamps import rfc3339, time_of

Json = dict[str, Any]

BASE: Final = timedelta(seconds=10)
"""As the kubelet's between two runs of a container."""
LONGEST: Final = timedelta(minutes=5)
"""The same: a node that was put right is used again after minutes."""
RAN_WELL: Final = timedelta(minutes=5)
"""A pod that runs as long is no part of a circle: models are loaded and iterations trained."""
REASONS_KEPT: Final = 16
"""Pods whose reason is kept; a lost rack has one reason and a thousand pods."""
REASON_MAX: Final = 256
SHOWN: Final = 3
"""Pods that are named; of more, the number is said."""


@dataclass(frozen=True)
class PodBackOff:
    """What is known of a pod that ended lately."""

    ends: int
    """In a row."""
    until: datetime
    """It is not made again before."""
    template_hash: str = ""
    """Of the template that the last one was made from."""
    reason: str = ""


def delay(ends: int) -> timedelta:
    """Return the time between the creation of a pod that was the last of so many to end, and of the next."""
    return timedelta(0) if ends <= 1 else min(LONGEST, BASE * 2 ** min(ends - 2, 16))


def known(status: Mapping[str, Any]) -> dict[str, PodBackOff]:
    """Return pod name -> back-off, from `status.restarts`."""
    back_offs = {}
    for entry in (status.get("restarts") or {}).get("backOff") or []:
        until = time_of(entry["until"])
        assert until is not None
        template_hash, reason = str(entry.get("template") or ""), str(entry.get("reason") or "")
        back_offs[str(entry["pod"])] = PodBackOff(int(entry["ends"]), until, template_hash, reason)
    return back_offs


def with_ends(
    status: Mapping[str, Any],
    pods: Iterable[ObservedPod],
    accounted: Collection[str],
    messages: Mapping[str, str],
    now: datetime,
) -> dict[str, PodBackOff]:
    """Return the back-offs of a status, with those of its pods that are accounted for by uid from now on and were not
    before.

    `messages`: uid -> how a pod ended, where that is known.
    """
    counted = {str(entry["id"]) for entry in (status.get("restarts") or {}).get("accounted") or []}
    back_offs = known(status)
    for pod in pods:
        if pod.uid in counted or pod.uid not in accounted:
            continue
        ends = 1 if _ran_well(pod, now) or pod.name not in back_offs else back_offs[pod.name].ends + 1
        until = max(now, (pod.created or now) + delay(ends))
        reason = messages.get(pod.uid, "")[:REASON_MAX]
        back_offs[pod.name] = PodBackOff(ends, until, pod.template_hash, reason)
    return back_offs


def still_valid(
    back_offs: Mapping[str, PodBackOff],
    wanted: Mapping[str, Group],
    hashes: Mapping[Group, str],
    pods: Mapping[str, ObservedPod],
    now: datetime,
) -> dict[str, PodBackOff]:
    """Return the back-offs that still matter. `wanted`: name -> group of every pod the job should have; `hashes`:
    template hash of each group."""
    valid = {}
    for name, back_off in back_offs.items():
        group, pod = wanted.get(name), pods.get(name)
        template_hash = hashes.get(group, "") if group else ""
        cured = bool(template_hash and back_off.template_hash) and template_hash != back_off.template_hash
        well = pod is not None and pod.active and pod.ready and _ran_well(pod, now)
        if group and not cured and not well:
            valid[name] = back_off
    return valid


def waiting(back_offs: Mapping[str, PodBackOff], now: datetime) -> dict[str, PodBackOff]:
    """Return the back-offs of pods that are not made yet."""
    return {name: back_off for name, back_off in back_offs.items() if back_off.until > now}


def requeue_after(back_offs: Mapping[str, PodBackOff], now: datetime) -> float | None:
    """Return the seconds until the next pod may be made; None: none waits."""
    return min(((entry.until - now).total_seconds() for entry in waiting(back_offs, now).values()), default=None)


def waiting_messages(back_offs: Mapping[str, PodBackOff], now: datetime) -> list[str]:
    """Return sentences about the pods that wait, those that wait longest first."""
    entries = sorted(waiting(back_offs, now).items(), key=lambda item: (-item[1].ends, item[0]))
    messages = [
        f"waits until {rfc3339(entry.until)} ({delay(entry.ends).total_seconds():.0f} s after it was last made) before "
        f"{name} is made again, because it ended {entry.ends} times in a row"
        + (f", the last time: {entry.reason}" if entry.reason else "")
        for name, entry in entries[:SHOWN]
    ]
    if len(entries) > SHOWN:
        messages.append(f"{len(entries) - SHOWN} more pods wait so")
    return messages


def written(back_offs: Mapping[str, PodBackOff]) -> list[Json]:
    """Return `status.restarts.backOff`."""
    newest = sorted(back_offs, key=lambda name: (back_offs[name].until, back_offs[name].ends), reverse=True)
    with_reason = set(newest[:REASONS_KEPT])
    entries = []
    for name, back_off in sorted(back_offs.items()):
        entry: Json = {"pod": name, "ends": back_off.ends, "until": rfc3339(back_off.until)}
        if back_off.template_hash:
            entry["template"] = back_off.template_hash
        if back_off.reason and name in with_reason:
            entry["reason"] = back_off.reason
        entries.append(entry)
    return entries


def _ran_well(pod: ObservedPod, now: datetime) -> bool:
    """Return whether the last run of its container was a long one."""
    if pod.began is None:
        return False
    ended = pod.end.at if pod.end is not None and pod.end.at is not None and pod.end.at >= pod.began else now
    return ended - pod.began >= RAN_WELL
