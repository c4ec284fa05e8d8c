"""The operator's memory of the cluster: the newest known version of each job, and small records of its objects.

An object belongs to a job if its controller is the RLHFJob of that uid; its label may be anybody's. Sends nothing.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from rlhf_common import names
from rlhf_operator.gang.apis import RESOURCES
from rlhf_operator.gang.backend import QueueApi, QueueObject
from rlhf_operator.gang.registry import queue_api_of
from rlhf_operator.reconcile.last_applied import FINGERPRINT
from rlhf_operator.reconcile.observed.observed_pod import ObservedPod
from rlhf_operator.reconcile.observed.pod_parsing import pod_of
from rlhf_operator.stored_job import stored_of
from rlhf_operator.untrusted import (
    NAME_MAX,
    DeletedObject,
    ObjectIdentity,
    UnreadableError,
    UnreadableObject,
    finalizers_of,
    identity_of,
    moment,
    text,
)

Json = dict[str, Any]

GONE_REMEMBERED: Final = 10_000
"""Maximum number of deleted objects whose late events are recognised."""


MAX_FINGERPRINT: Final = 64
"""Most characters of a fingerprint that are stored; ours have 16."""
MAX_UNREADABLE_NAMED: Final = 64
"""Most unreadable objects of a job that are returned at once, pods first."""


def key_of(body: Mapping[str, Any]) -> str | None:
    """Return `namespace/name` of a stored job; None if it cannot be read."""
    try:
        return f"{_name(body['metadata']['namespace'])}/{_name(body['metadata']['name'])}"
    except (KeyError, TypeError, UnreadableError):
        return None


def owner_key(body: Mapping[str, Any]) -> str | None:
    """Return `namespace/name` of the job in an object's label; None if it has none or cannot be read."""
    try:
        meta = body["metadata"]
        name = (meta.get("labels") or {}).get(names.LABEL_JOB_NAME)
        return f"{_name(meta['namespace'])}/{_name(name)}" if name else None
    except (AttributeError, KeyError, TypeError, UnreadableError):
        return None


def _name(value: Any) -> str:
    return text(value, "name", NAME_MAX, empty=False)


@dataclass(frozen=True, slots=True)
class OwnedObject:
    """Metadata that matters of an object of a job that is not a pod."""

    version: int
    uid: str
    owner: str
    """uid of the object that controls it."""
    fingerprint: str
    """Fingerprint in its annotation; empty if it is being deleted or has none."""
    deleted: datetime | None = None
    """Time of the deletion request if finalizers delay it; else None."""
    finalizers: tuple[str, ...] = ()
    """Finalizers that delay the deletion."""


class Index:
    """Jobs, pods and other objects by job key."""

    def __init__(
        self, on_unreadable: Callable[[str, str, UnreadableObject], None] | None = None, operator_class: str = ""
    ) -> None:
        """`on_unreadable(kind, key, what)` reports an object that cannot be read.

        `jobs` and `job` leave out jobs of another class than `operator_class`.
        """
        self._class = operator_class
        self._on_unreadable = on_unreadable or (lambda kind, key, unreadable: None)
        self._jobs: dict[str, tuple[int, str, bytes]] = {}
        """Job -> (version, uid, body); the body is empty for a job of another class."""
        self._pods: dict[str, dict[str, ObservedPod | UnreadableObject]] = {}
        self._others: dict[str, dict[tuple[str, str], OwnedObject]] = {}
        self._queue_objects: dict[str, dict[tuple[QueueApi, str], QueueObject]] = {}
        """Job -> (queue, name) -> object that represents it in that queue."""
        self._strange: dict[str, dict[tuple[str, bool], tuple[str, UnreadableObject]]] = {}
        """Job -> (uid, whether it was read for a queue) -> (kind, what): objects other than pods whose newest version
        cannot be read."""
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._ended: dict[str, dict[str, ObservedPod]] = {}
        """Job -> uid -> last version of deleted pods that no reconcile has accounted for."""

    def jobs(self) -> Iterator[str]:
        """Return the keys of all jobs of our class."""
        return iter([key for key, (_, _, body) in self._jobs.items() if body])

    def version(self, key: str) -> int:
        """Return the resourceVersion of the job; 0 if it is unknown."""
        return self._jobs.get(key, (0, "", b""))[0]

    def job(self, key: str) -> Json | None:
        """Return the stored RLHFJob; None if it is unknown or of another class."""
        stored = self._jobs.get(key)
        if stored is None or not stored[2]:
            return None
        body: Json = json.loads(stored[2])
        return body

    def put_job(self, body: Mapping[str, Any]) -> bool:
        """Store a version of a job; return whether decisions may change."""
        key = key_of(body)
        try:
            stored = stored_of(body)
        except UnreadableError as error:
            self._on_unreadable(names.KIND, key or "", UnreadableObject("", "", 0, "", str(error)))
            return False
        if key is None or stored.version <= self.version(key) or stored.uid in self._gone:
            return False
        if stored.operator_class != self._class:
            # The version is stored so that a comparison with a listing, which has no class, does not report the job as
            # missing.
            ours = self.job(key) is not None
            self._jobs[key] = stored.version, stored.uid, b""
            return ours
        if stored.wrong:
            unreadable = UnreadableObject(key.partition("/")[2], stored.uid, stored.version, "", stored.wrong)
            self._on_unreadable(names.KIND, key, unreadable)
        self._jobs[key] = stored.version, stored.uid, stored.body
        return True

    def drop_job(self, key: str, uid: str) -> None:
        """Drop a deleted job and its ended pods, but not its other objects."""
        self._bury(uid)
        stored = self._jobs.get(key)
        if stored is not None and stored[1] == uid:
            del self._jobs[key]
            self._ended.pop(key, None)

    def pods(self, key: str, uid: str) -> tuple[dict[str, ObservedPod], frozenset[str]]:
        """Return the pods of the job of that uid by name, and the names that other or unreadable pods occupy."""
        result = self._pods.get(key, {})
        ours = {name: pod for name, pod in result.items() if isinstance(pod, ObservedPod) and pod.owner == uid}
        return ours, frozenset(result.keys() - ours.keys())

    def unreadable(self, key: str, uid: str) -> tuple[tuple[str, UnreadableObject], ...]:
        """Return (kind, what) of the unreadable objects of the job of that uid, pods first, at most
        MAX_UNREADABLE_NAMED.
        """
        pods = (("Pod", item) for item in self._pods.get(key, {}).values() if isinstance(item, UnreadableObject))
        result = [*pods, *self._strange.get(key, {}).values()]
        return tuple((kind, each) for kind, each in result if each.owner == uid)[:MAX_UNREADABLE_NAMED]

    def put_pod(self, key: str, body: Mapping[str, Any]) -> bool:
        """Store a version of a pod unless a newer one is known; return whether anything that decisions read changed."""
        pod = pod_of(body)
        if isinstance(pod, UnreadableObject) and not pod.uid:
            return self._cannot_read(key, "Pod", None, pod.why)
        if pod.uid in self._gone:
            return False
        pods = self._pods.setdefault(key, {})
        stored = pods.get(pod.name)
        seen = stored.version if stored is not None and stored.uid == pod.uid else -1
        if seen > pod.version or (seen == pod.version and "spec" not in body):
            return False
        pods[pod.name] = pod
        if isinstance(pod, UnreadableObject) and stored != pod:
            self._on_unreadable("Pod", key, pod)
        return stored != pod

    def drop_pod(self, key: str, name: str, uid: str, last: Mapping[str, Any] | None = None) -> None:
        """Drop a deleted pod. `last`: its last version, which `ended` may return until it is settled."""
        pod = pod_of(last) if last is not None and uid not in self._gone else None
        if isinstance(pod, ObservedPod) and pod.deletion is not None and self.job(key) is not None:
            self._ended.setdefault(key, {})[uid] = pod
        self._bury(uid)
        pods = self._pods.get(key, {})
        if name in pods and pods[name].uid == uid:
            del pods[name]
            if not pods:
                del self._pods[key]

    def ended(self, key: str, uid: str) -> tuple[ObservedPod, ...]:
        """Return the deleted pods of the job of that uid that `drop_pod` recorded and that are not yet settled."""
        return tuple(pod for pod in self._ended.get(key, {}).values() if pod.owner == uid)

    def settle(self, key: str, pods: Iterable[ObservedPod]) -> None:
        """Forget deleted pods that are accounted for."""
        ended = self._ended.get(key, {})
        for pod in pods:
            ended.pop(pod.uid, None)
        if not ended:
            self._ended.pop(key, None)

    def applied(self, key: str, uid: str) -> dict[tuple[str, str], str]:
        """Return (kind, name) -> fingerprint of the other objects of the job of that uid."""
        return {place: other.fingerprint for place, other in self._others.get(key, {}).items() if other.owner == uid}

    def deleted(self, key: str, uid: str) -> tuple[DeletedObject, ...]:
        """Return other objects whose deletion finalizers delay: those of the job of that uid, and gang objects of any
        owner.
        """
        others = self._others.get(key, {}).items()
        return tuple(
            DeletedObject(kind.rpartition("/")[2], name, other.deleted, other.finalizers)
            for (kind, name), other in others
            if other.deleted is not None and (other.owner == uid or kind in RESOURCES)
        )

    def put_other(self, key: str, kind: str, meta: Mapping[str, Any]) -> bool:
        """Store the metadata of another object of a job; return whether decisions may change."""
        try:
            name, result = _other(meta)
        except UnreadableError as error:
            return self._cannot_read(key, kind.rpartition("/")[2], meta, str(error))
        if result.uid in self._gone:
            return False
        corrected = self._can_read(key, result)
        others = self._others.setdefault(key, {})
        stored = others.get((kind, name))
        if stored is not None and stored.uid == result.uid and stored.version >= result.version:
            return corrected
        others[kind, name] = result
        return corrected or stored is None or stored != replace(result, version=stored.version)

    def drop_other(self, key: str, kind: str, name: str, uid: str) -> None:
        """Drop a deleted object of a job that is not a pod."""
        self._bury(uid)
        if (api := queue_api_of(kind)) is not None:
            self._drop_queue_object(key, api, name, uid)
        if (strange := self._strange.get(key)) is not None:
            for queued in (False, True):
                strange.pop((uid, queued), None)
            if not strange:
                del self._strange[key]
        others = self._others.get(key, {})
        if (stored := others.get((kind, name))) is not None and stored.uid == uid:
            del others[kind, name]
            if not others:
                del self._others[key]

    def other(self, key: str, uid: str, kind: str, name: str) -> str | None:
        """Return the uid of an object other than a pod; None if the job of that uid controls none of this kind and
        name.
        """
        stored = self._others.get(key, {}).get((kind, name))
        return stored.uid if stored and stored.owner == uid else None

    def queue_object(self, key: str, uid: str, api: QueueApi) -> QueueObject | None:
        """Return the object that represents the job of that uid in this queue; None without one.

        An object of one of the job's names that another job owns counts as being deleted.
        """
        objects = {name: queued for (each, name), queued in self._queue_objects.get(key, {}).items() if each is api}
        if ours := [queued for queued in objects.values() if queued.owner == uid]:
            return api.current(ours)
        earlier = [objects[name] for name in api.object_names(key.partition("/")[2]) if name in objects]
        return earlier[0].leaving() if earlier else None

    def put_queue_object(self, key: str, kind: str, api: QueueApi, body: Mapping[str, Any]) -> bool:
        """Store a version of a queue's object with its status; return whether decisions may change.

        If the new version cannot be read, the last readable one stays.
        """
        try:
            queued = api.parse(body)
        except UnreadableError as error:
            return self._cannot_read(key, kind.rpartition("/")[2], body["metadata"], str(error), queued=True)
        corrected = self._can_read(key, queued, queued=True)
        objects = self._queue_objects.setdefault(key, {})
        stored = objects.get((api, queued.name))
        if queued.uid in self._gone or (stored and stored.uid == queued.uid and stored.version >= queued.version):
            return corrected
        objects[api, queued.name] = queued
        return corrected or stored is None or stored != queued.at_version(stored.version)

    def _cannot_read(self, key: str, kind: str, meta: Any, why: str, *, queued: bool = False) -> bool:
        """Record an object that cannot be read; return whether that is news."""
        try:
            result = identity_of(meta)
        except UnreadableError:
            result = ObjectIdentity("", "", 0, "")
        if result.uid in self._gone:
            return False
        unreadable = UnreadableObject(result.name, result.uid, result.version, result.owner, why)
        strange, place = self._strange.setdefault(key, {}) if unreadable.uid else {}, (unreadable.uid, queued)
        before, strange[place] = strange.get(place), (kind, unreadable)
        if before != (kind, unreadable):
            self._on_unreadable(kind, key, unreadable)
        return bool(unreadable.uid) and before != (kind, unreadable)

    def _can_read(self, key: str, result: OwnedObject | QueueObject, *, queued: bool = False) -> bool:
        """Forget that an earlier version of an object could not be read; return whether it was so."""
        strange, place = self._strange.get(key, {}), (result.uid, queued)
        if place not in strange or strange[place][1].version >= result.version:
            return False
        del strange[place]
        return True

    def _drop_queue_object(self, key: str, api: QueueApi, name: str, uid: str) -> None:
        objects = self._queue_objects.get(key, {})
        if (stored := objects.get((api, name))) is not None and stored.uid == uid:
            del objects[api, name]
            if not objects:
                del self._queue_objects[key]

    def stored_versions(self, kind: str) -> dict[str, tuple[str, str, int]]:
        """Return uid -> (job key, name, resourceVersion) of all objects of a kind, to compare with a listing."""
        result = {}
        if kind == names.KIND:
            for key, (version, uid, _) in self._jobs.items():
                result[uid] = key, key.partition("/")[2], version
        elif kind == "Pod":
            for key, pods in self._pods.items():
                result |= {pod.uid: (key, pod.name, pod.version) for pod in pods.values()}
        else:
            for key, others in self._others.items():
                ours = ((name, other) for (each, name), other in others.items() if each == kind)
                result |= {other.uid: (key, name, other.version) for name, other in ours}
        return result

    def drop(self, kind: str, key: str, name: str, uid: str, last: Mapping[str, Any] | None = None) -> None:
        """Drop a deleted object of any kind; `last`: its last version, if known."""
        if kind == names.KIND:
            self.drop_job(key, uid)
        elif kind == "Pod":
            self.drop_pod(key, name, uid, last)
        else:
            self.drop_other(key, kind, name, uid)

    def put(self, kind: str, key: str, body: Mapping[str, Any]) -> bool:
        """Store a version of an object of any kind; return whether decisions may change."""
        if kind == names.KIND:
            return self.put_job(body)
        if kind == "Pod":
            return self.put_pod(key, body)
        api = queue_api_of(kind)
        news = api is not None and self.put_queue_object(key, kind, api, body)
        return self.put_other(key, kind, body["metadata"]) or news

    def gone(self) -> frozenset[str]:
        """Return the uids of the deleted objects that are remembered."""
        return frozenset(self._gone)

    def unlearn(self, kind: str, key: str, name: str, uid: str) -> None:
        """Forget an object and its deletion, because the cluster was restored from a backup."""
        self.drop(kind, key, name, uid)
        self._gone.pop(uid, None)

    def _bury(self, uid: str) -> None:
        self._gone[uid] = None
        if len(self._gone) > GONE_REMEMBERED:
            self._gone.popitem(last=False)


def _other(meta: Any) -> tuple[str, OwnedObject]:
    identity = identity_of(meta)
    notes, deleted = meta.get("annotations"), meta.get("deletionTimestamp")
    fingerprint = notes.get(FINGERPRINT) if isinstance(notes, dict) and not deleted else None
    finalizers = finalizers_of(meta) if deleted else ()
    return identity.name, OwnedObject(
        identity.version,
        identity.uid,
        identity.owner,
        fingerprint[:MAX_FINGERPRINT] if isinstance(fingerprint, str) else "",
        moment(deleted, "metadata.deletionTimestamp") if finalizers else None,
        finalizers,
    )
