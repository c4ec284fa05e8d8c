"""What the operator remembers of the cluster: the newest version of every job, and small records of its objects.

Rule: filled from watches and from the answers to our own writes; of two versions of an object the newer stays,
whichever arrives last. Lost with the process and filled again from the first listing. Owns no decision, sends nothing.
"""

import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from rlhf_api import names
from rlhf_operator.gang.kueue import CLAIMS
from rlhf_operator.gang.kueue_workload import Workload, is_workload, workload_of
from rlhf_operator.reconcile.applied import FINGERPRINT
from rlhf_operator.reconcile.pod import Pod, pod_of

Json = dict[str, Any]

GONE_REMEMBERED: Final = 10_000
"""Deleted objects whose late events are still recognised."""


def key_of(body: Mapping[str, Any]) -> str:
    """`namespace/name` of a job's stored object."""
    return f"{body['metadata']['namespace']}/{body['metadata']['name']}"


def owner_key(body: Mapping[str, Any]) -> str | None:
    """`namespace/name` of the job an object belongs to, by its label."""
    meta = body["metadata"]
    name = (meta.get("labels") or {}).get(names.LABEL_JOB_NAME)
    return f"{meta['namespace']}/{name}" if name else None


class Index:
    """Jobs, pods and other objects by job key."""

    def __init__(self) -> None:
        self._jobs: dict[str, tuple[int, str, bytes]] = {}
        self._pods: dict[str, dict[str, tuple[str, Pod]]] = {}
        self._others: dict[str, dict[tuple[str, str], tuple[int, str, str]]] = {}
        self._workloads: dict[str, tuple[str, Workload]] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._ended: dict[str, dict[str, tuple[str, Pod]]] = {}
        """Job -> uid -> (uid of the job, last version) of deleted pods that no turn has accounted for."""

    def jobs(self) -> Iterator[str]:
        """Keys of all jobs."""
        return iter(list(self._jobs))

    def version(self, key: str) -> int:
        """resourceVersion of the job as it is known; 0 when it is not."""
        return self._jobs.get(key, (0, "", b""))[0]

    def job(self, key: str) -> Json | None:
        """The stored RLHFJob."""
        known = self._jobs.get(key)
        if known is None:
            return None
        body: Json = json.loads(known[2])
        return body

    def put_job(self, body: Mapping[str, Any]) -> bool:
        """A version of a job was seen; whether it is a newer one than was known."""
        key, version = key_of(body), int(body["metadata"]["resourceVersion"])
        if version <= self.version(key) or body["metadata"]["uid"] in self._gone:
            return False
        # Bytes are a sixth of the size of the same thing as Python objects.
        meta = {name: value for name, value in body["metadata"].items() if name not in ("managedFields", "annotations")}
        kept = {**body, "metadata": meta}
        self._jobs[key] = version, str(meta["uid"]), json.dumps(kept, separators=(",", ":")).encode()
        return True

    def drop_job(self, body: Mapping[str, Any]) -> None:
        """The job is gone; its objects follow one by one."""
        self._bury(str(body["metadata"]["uid"]))
        known = self._jobs.get(key_of(body))
        if known is not None and known[1] == body["metadata"]["uid"]:
            del self._jobs[key_of(body)]
            self._ended.pop(key_of(body), None)

    def pods(self, key: str, uid: str) -> tuple[dict[str, Pod], frozenset[str]]:
        """The pods of the job of that uid by name, and the names taken by those of an earlier job of its name."""
        found = self._pods.get(key, {})
        ours = {name: pod for name, (owner, pod) in found.items() if owner == uid}
        return ours, frozenset(found.keys() - ours.keys())

    def put_pod(self, key: str, body: Mapping[str, Any]) -> bool:
        """A version of a pod was seen; whether anything that decisions read is another than was known."""
        pod = pod_of(body)
        if pod is None or pod.uid in self._gone:
            return False
        pods = self._pods.setdefault(key, {})
        known = pods.get(pod.name)
        if known is not None and known[1].uid == pod.uid and known[1].version >= pod.version:
            return False
        owner = (body["metadata"].get("labels") or {}).get(names.LABEL_JOB_UID, "")
        pods[pod.name] = owner, pod
        return known != (owner, pod)

    def drop_pod(self, key: str, name: str, uid: str, last: Mapping[str, Any] | None = None) -> None:
        """A pod is gone. `last`: its last version; one that was being deleted stays to be accounted for.

        The deletion may have been asked for and done between two turns, so that none saw the pod go.
        """
        pod = pod_of(last) if last is not None and uid not in self._gone else None
        if last is not None and pod is not None and pod.deletion is not None and key in self._jobs:
            owner = (last["metadata"].get("labels") or {}).get(names.LABEL_JOB_UID, "")
            self._ended.setdefault(key, {})[uid] = owner, pod
        self._bury(uid)
        pods = self._pods.get(key, {})
        if name in pods and pods[name][1].uid == uid:
            del pods[name]
            if not pods:
                del self._pods[key]

    def ended(self, key: str, uid: str) -> tuple[Pod, ...]:
        """Pods of the job of that uid that were deleted since they were last settled."""
        return tuple(pod for owner, pod in self._ended.get(key, {}).values() if owner == uid)

    def settle(self, key: str, pods: Iterable[Pod]) -> None:
        """These deleted pods are accounted for."""
        ended = self._ended.get(key, {})
        for pod in pods:
            ended.pop(pod.uid, None)
        if not ended:
            self._ended.pop(key, None)

    def applied(self, key: str) -> dict[tuple[str, str], str]:
        """(kind, name) -> fingerprint, of the job's other objects."""
        return {place: mark for place, (_, _, mark) in self._others.get(key, {}).items()}

    def put_other(self, key: str, kind: str, meta: Mapping[str, Any]) -> bool:
        """A version of another object of a job was seen, its metadata is enough; whether decisions may be others."""
        version, uid = int(meta["resourceVersion"]), str(meta["uid"])
        if uid in self._gone:
            return False
        others = self._others.setdefault(key, {})
        known = others.get((kind, meta["name"]))
        if known is not None and known[1] == uid and known[0] >= version:
            return False
        mark = (meta.get("annotations") or {}).get(FINGERPRINT, "")
        if meta.get("deletionTimestamp"):
            mark = ""
        others[(kind, str(meta["name"]))] = version, uid, mark
        return known is None or known[1:] != (uid, mark)

    def drop_other(self, key: str, kind: str, meta: Mapping[str, Any]) -> None:
        """Another object of a job is gone."""
        self._bury(str(meta["uid"]))
        if is_workload(kind) and key in self._workloads and self._workloads[key][1].uid == meta["uid"]:
            del self._workloads[key]
        others = self._others.get(key, {})
        if others.get((kind, meta["name"]), (0, "", ""))[1] == meta["uid"]:
            del others[(kind, str(meta["name"]))]
            if not others:
                del self._others[key]

    def other(self, key: str, kind: str, name: str) -> str | None:
        """uid of another object of a job."""
        known = self._others.get(key, {}).get((kind, name))
        return known[1] if known else None

    def workload(self, key: str, uid: str) -> Workload | None:
        """The Kueue Workload of the job of that uid; one of an earlier job of its name is on its way out."""
        owner, found = self._workloads.get(key, ("", None))
        return found if found is None or owner == uid else replace(found, going=True)

    def put_workload(self, key: str, body: Mapping[str, Any]) -> bool:
        """A version of a Workload was seen with its status; whether decisions may be others."""
        found = workload_of(body, CLAIMS)
        known = self._workloads.get(key)
        if found.uid in self._gone or (known and known[1].uid == found.uid and known[1].version >= found.version):
            return False
        owner = (body["metadata"].get("labels") or {}).get(names.LABEL_JOB_UID, "")
        self._workloads[key] = owner, found
        return known is None or known[1] != replace(found, version=known[1].version)

    def known(self, kind: str) -> dict[str, tuple[str, str, int]]:
        """uid -> (job key, name, resourceVersion) of everything of a kind, to compare with a listing."""
        found = {}
        if kind == names.KIND:
            for key, (version, uid, _) in self._jobs.items():
                found[uid] = key, key.partition("/")[2], version
        elif kind == "Pod":
            for key, pods in self._pods.items():
                found |= {pod.uid: (key, pod.name, pod.version) for _, pod in pods.values()}
        else:
            for key, others in self._others.items():
                ours = ((name, entry) for (each, name), entry in others.items() if each == kind)
                found |= {uid: (key, name, version) for name, (version, uid, _) in ours}
        return found

    def drop(self, kind: str, key: str, name: str, uid: str, last: Mapping[str, Any] | None = None) -> None:
        """An object of any kind is gone; `last`: its last version, where that is known."""
        meta = {"name": name, "uid": uid, "namespace": key.partition("/")[0]}
        if kind == names.KIND:
            self.drop_job({"metadata": meta})
        elif kind == "Pod":
            self.drop_pod(key, name, uid, last)
        else:
            self.drop_other(key, kind, meta)

    def put(self, kind: str, key: str, body: Mapping[str, Any]) -> bool:
        """A version of an object of any kind was seen; whether a decision may be another now."""
        if kind == names.KIND:
            return self.put_job(body)
        if kind == "Pod":
            return self.put_pod(key, body)
        news = is_workload(kind) and self.put_workload(key, body)
        return self.put_other(key, kind, body["metadata"]) or news

    def _bury(self, uid: str) -> None:
        self._gone[uid] = None
        if len(self._gone) > GONE_REMEMBERED:
            self._gone.popitem(last=False)
