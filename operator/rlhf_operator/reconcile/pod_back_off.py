"""How long a place in the job waits before its pod is made again: the more often in a row it ended, the longer.

A place is a pod's name: its group and index. Whatever ended the pod counts (a failure, a disruption, a request, a
restart of its group), for what makes pods in a circle harms the node, the API server and the job alike. The first
replacement is made at once; the following ones BASE after the pod before was made, then twice as long each time, to
LONGEST. A pod that ran WELL long begins anew, and so does one whose template is another one by now, as that may be the
cure. So a place has at most 7 pods in WELL, and 12 an hour when none of them runs that long.
Rule: pure. Counted from the creation of a pod and kept in `status.restarts.backOff`, so that neither a restart of the
operator nor a slow node changes it; a pod's end is entered once, with the write that accounts for it.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from rlhf_api.names import Group
from rlhf_operator.reconcile.conditions import rfc3339
from rlhf_operator.reconcile.observed_pod import ObservedPod, time_of

Json = dict[str, Any]

BASE: Final = timedelta(seconds=10)
"""As the kubelet's between two runs of a container."""
LONGEST: Final = timedelta(minutes=5)
"""The same: a node that was put right is used again after minutes."""
WELL: Final = timedelta(minutes=5)
"""A pod that runs as long is no part of a circle: models are loaded and iterations trained."""
REASONS_KEPT: Final = 16
"""Places whose reason is kept; a lost rack has one reason and a thousand places."""
REASON_MAX: Final = 256
SHOWN: Final = 3
"""Places that are named; of more, the number is said."""


@dataclass(frozen=True)
class PodBackOff:
    """What is known of one whose pod ended lately."""

    ends: int
    """In a row."""
    until: datetime
    """Its pod is not made before."""
    template: str = ""
    """Fingerprint of the template the last pod was made from."""
    reason: str = ""


def delay(ends: int) -> timedelta:
    """Time between the creation of a pod that was the last of so many to end, and of the next."""
    return timedelta(0) if ends <= 1 else min(LONGEST, BASE * 2 ** min(ends - 2, 16))


def known(before: Mapping[str, Any]) -> dict[str, PodBackOff]:
    """Pod name -> place, from `status.restarts`."""
    found = {}
    for each in (before.get("restarts") or {}).get("backOff") or []:
        until = time_of(each["until"])
        assert until is not None
        told = str(each.get("template") or ""), str(each.get("reason") or "")
        found[str(each["pod"])] = PodBackOff(int(each["ends"]), until, *told)
    return found


def entered(
    before: Mapping[str, Any],
    pods: Iterable[ObservedPod],
    accounted: Collection[str],
    words: Mapping[str, str],
    now: datetime,
) -> dict[str, PodBackOff]:
    """The places of a status, with those of its pods that are accounted for by uid from now on and were not before.

    `words`: uid -> how one ended, where that is known.
    """
    counted = {str(each["id"]) for each in (before.get("restarts") or {}).get("accounted") or []}
    found = known(before)
    for pod in pods:
        if pod.uid in counted or pod.uid not in accounted:
            continue
        ends = 1 if _ran_well(pod, now) or pod.name not in found else found[pod.name].ends + 1
        until = max(now, (pod.created or now) + delay(ends))
        found[pod.name] = PodBackOff(ends, until, pod.template, words.get(pod.uid, "")[:REASON_MAX])
    return found


def kept(
    places: Mapping[str, PodBackOff],
    wanted: Mapping[str, Group],
    marks: Mapping[Group, str],
    pods: Mapping[str, ObservedPod],
    now: datetime,
) -> dict[str, PodBackOff]:
    """Those that still matter; `wanted`: name -> group of every pod the job should have."""
    found = {}
    for name, place in places.items():
        group, pod = wanted.get(name), pods.get(name)
        mark = marks.get(group, "") if group else ""
        cured = bool(mark and place.template) and mark != place.template
        well = pod is not None and pod.active and pod.ready and _ran_well(pod, now)
        if group and not cured and not well:
            found[name] = place
    return found


def waiting(places: Mapping[str, PodBackOff], now: datetime) -> dict[str, PodBackOff]:
    """Those whose pod is not made yet."""
    return {name: place for name, place in places.items() if place.until > now}


def requeue_after(places: Mapping[str, PodBackOff], now: datetime) -> float | None:
    """Seconds until the next pod may be made."""
    return min(((place.until - now).total_seconds() for place in waiting(places, now).values()), default=None)


def told(places: Mapping[str, PodBackOff], now: datetime) -> list[str]:
    """Sentences about what waits, those that wait longest first."""
    found = sorted(waiting(places, now).items(), key=lambda each: (-each[1].ends, each[0]))
    sentences = [
        f"waits until {rfc3339(place.until)} ({delay(place.ends).total_seconds():.0f} s after it was last made) before "
        f"{name} is made again, because it ended {place.ends} times in a row"
        + (f", the last time: {place.reason}" if place.reason else "")
        for name, place in found[:SHOWN]
    ]
    if len(found) > SHOWN:
        sentences.append(f"{len(found) - SHOWN} more pods wait so")
    return sentences


def written(places: Mapping[str, PodBackOff]) -> list[Json]:
    """`status.restarts.backOff`."""
    newest = sorted(places, key=lambda name: (places[name].until, places[name].ends), reverse=True)[:REASONS_KEPT]
    found = []
    for name, place in sorted(places.items()):
        entry: Json = {"pod": name, "ends": place.ends, "until": rfc3339(place.until)}
        if place.template:
            entry["template"] = place.template
        if place.reason and name in newest:
            entry["reason"] = place.reason
        found.append(entry)
    return found


def _ran_well(pod: ObservedPod, now: datetime) -> bool:
    """The last run of its container was a long one."""
    if pod.began is None:
        return False
    ended = pod.end.at if pod.end is not None and pod.end.at is not None and pod.end.at >= pod.began else now
    return ended - pod.began >= WELL
