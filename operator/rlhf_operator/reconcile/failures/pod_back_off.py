"""Delays the next creation of a pod: the more often it ended in a row, the longer. Rule: pure.

The count restarts after a pod ran for RAN_WELL, or when its template has changed.
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
"""First delay that is not zero, as the kubelet's between two runs of a container."""
LONGEST: Final = timedelta(minutes=5)
"""Longest delay, as the kubelet's."""
RAN_WELL: Final = timedelta(minutes=5)
"""Running time that ends a back-off."""
REASONS_KEPT: Final = 16
"""Most pods whose reason is stored."""
REASON_MAX: Final = 256
SHOWN: Final = 3
"""Pods that are named; for more, the number is given."""


@dataclass(frozen=True)
class PodBackOff:
    """The back-off of one pod name after ends of its pods."""

    ends: int
    """Consecutive ends."""
    until: datetime
    """Time before which it is not created again."""
    template_hash: str = ""
    """Hash of the template of the latest pod."""
    reason: str = ""


def delay(ends: int) -> timedelta:
    """Return the least delay between the creation of a pod and of its replacement after some consecutive ends."""
    return timedelta(0) if ends <= 1 else min(LONGEST, BASE * 2 ** min(ends - 2, 16))


def stored_back_offs(status: Mapping[str, Any]) -> dict[str, PodBackOff]:
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
    """Return the back-offs of a status, updated for pods that are newly accounted for by uid.

    `messages`: uid -> how a pod ended, if known.
    """
    counted = {str(entry["id"]) for entry in (status.get("restarts") or {}).get("accounted") or []}
    back_offs = stored_back_offs(status)
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
    """Return the back-offs that still apply. `wanted`: name -> group of every pod of the job; `hashes`: template
    hashes.
    """
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
    """Return the back-offs whose `until` is later than now."""
    return {name: back_off for name, back_off in back_offs.items() if back_off.until > now}


def requeue_after(back_offs: Mapping[str, PodBackOff], now: datetime) -> float | None:
    """Return the seconds until the next pod may be created; None if none waits."""
    return min(((entry.until - now).total_seconds() for entry in waiting(back_offs, now).values()), default=None)


def waiting_messages(back_offs: Mapping[str, PodBackOff], now: datetime) -> list[str]:
    """Return sentences about the waiting pods, starting with those that ended most often."""
    entries = sorted(waiting(back_offs, now).items(), key=lambda item: (-item[1].ends, item[0]))
    messages = [
        f"waits until {rfc3339(entry.until)} ({delay(entry.ends).total_seconds():.0f} s after the last creation) "
        f"before it creates {name} again, because {name} ended {entry.ends} times in a row"
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
    """Return whether the last run of its container lasted at least RAN_WELL."""
    if pod.began is None:
        return False
    ended = pod.end.at if pod.end is not None and pod.end.at is not None and pod.end.at >= pod.began else now
    return ended - pod.began >= RAN_WELL
