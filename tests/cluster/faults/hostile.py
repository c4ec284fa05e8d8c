"""Objects that a hostile tenant posts, from a seed: they pretend to be something else. Pure.

Rule: this module filters nothing; the operator must cope with all that the API server accepts. All objects are in the
tenant's namespace, where it may write all names, labels and owners, including those of other tenants' jobs.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

Json = dict[str, Any]

NOWHERE: Final = {"nowhere": "true"}
"""Node selector of pods that must not run: a test writes their status, as a kubelet would."""
SQUATTED: Final = 40
"""Future jobs whose names are occupied first; the objects stay and are compared at the end."""
LARGE: Final = 200_000
"""Characters of a repeatedly edited manifest."""
OWN_JOBS: Final = 12
"""Names that the tenant's own jobs share: they are created, edited and deleted in turn."""
WORDS: Final[tuple[Any, ...]] = (
    *("abc", "-1", "", "9" * 60, "007", "1e9", "None", "true", "a" * 63, "0x10"),
    *("coordinator", "generation", "nobody"),
)
"""Values of labels."""
LINES: Final[tuple[str, ...]] = (
    '{"report": {"iteration": "final"}}',
    '{"report": {"iteration": 1e999, "metrics": [1]}}',
    '{"report": {"iteration": ' + "9" * 5000 + "}}",
    "[" * 2000,
    '{"a":' * 2000,
    '{"report": {"iteration": -5, "checkpoint": "' + "x" * 3000 + '", "metrics": {"reward": NaN, "kl": "1"}}}',
    '{"metrics": {"reward": [[[]]]}, "report": []}',
    "\ud83d\ufffe\u2028 \x00\x1b[31m red",
    "x" * 4000,
)
"""Last lines of a log."""


@dataclass(frozen=True)
class Post:
    """One object to post."""

    kind: str
    body: Json
    status: Json | None = None
    """Status written after it, as by a kubelet."""
    foreign: bool = False
    """Whether it must be unchanged at the end."""
    edit: bool = False
    """Whether it changes `spec.generation` of the job of that name, if the job exists."""


class Hostile:
    """A tenant with a seed."""

    def __init__(self, seed: int, namespace: str, job: Json, targets: Sequence[tuple[str, str]], image: str) -> None:
        """`job`: a valid manifest; `targets`: (name, uid) of other tenants' jobs; `image`: one with a shell."""
        self._random, self._namespace, self._job = random.Random(seed), namespace, job
        self._targets, self._image = list(targets), image
        self._count, self._squatted = 0, 0

    def moves(self) -> Iterator[list[Post]]:
        """Yield posts endlessly."""
        makers = [self._pod, self._pod, self._pod, self._malformed, self._edited, self._squat, self._alike, self._talks]
        while True:
            for make in self._random.sample(makers, len(makers)):
                self._count += 1
                yield make()

    def _choice(self, values: Sequence[Any]) -> Any:
        return self._random.choice(values)

    def _own(self) -> str:
        return f"own-{self._random.randrange(OWN_JOBS)}"

    def _meta(self, name: str, **more: Any) -> Json:
        return {"name": name, "namespace": self._namespace} | more

    def _labels(self) -> Json:
        """Return the labels of a job's pod, up to three of them wrong."""
        name, uid = self._choice([*self._targets, (self._own(), "none"), (f"wild-{self._squatted}", "none")])
        right = {
            "rlhf.dev/job-name": name,
            "rlhf.dev/job-uid": uid,
            "rlhf.dev/group": self._choice(["coordinator", "generation", "inference", "training"]),
            "rlhf.dev/index": "0",
            "rlhf.dev/epoch": "0",
            "rlhf.dev/migration-pool": "true",
        }
        for key in self._random.sample(list(right)[1:], self._random.randint(0, 3)):
            right[key] = self._choice(WORDS)
        return right

    def _owners(self) -> list[Json]:
        """Return a forged controller: a job of another tenant, with its real uid."""
        name, uid = self._choice(self._targets)
        return [{"apiVersion": "rlhf.dev/v1alpha1", "kind": "RLHFJob", "name": name, "uid": uid, "controller": True}]

    def _pod(self) -> list[Post]:
        labels = self._labels()
        name = self._choice([f"pod-{self._count}", f"{labels['rlhf.dev/job-name']}-coordinator"])
        meta = self._meta(name, labels=labels, annotations={"rlhf.dev/template": self._choice(["", "x" * 5000])})
        if self._random.random() < 0.3:
            meta["ownerReferences"] = self._owners()
        container = {"name": self._choice(["worker", "other"]), "image": self._image}
        spec = {"nodeSelector": NOWHERE, "containers": [container], "restartPolicy": "Never"}
        return [Post("Pod", {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}, self._said())]

    def _said(self) -> Json:
        """Return a status with a hostile end."""
        code = self._choice([0, 1, 137, -1, 2**31 - 1])
        state = {"exitCode": code, "reason": "Error", "message": self._choice(LINES)[:4096], "containerID": "x" * 300}
        state["finishedAt"] = self._choice(["9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z", None])
        item = {
            "name": "worker",
            "image": "",
            "imageID": "",
            "ready": True,
            "restartCount": self._choice([0, 2**31 - 1]),
        }
        result: Json = {"containerStatuses": [item | {self._choice(["state", "lastState"]): {"terminated": state}}]}
        result["conditions"] = [{"type": self._choice(["Ready", "DisruptionTarget", "x" * 300]), "status": "True"}]
        return result | {"phase": self._choice(["Failed", "Running", "Succeeded"]), "podIP": "127.0.0.1"}

    def _base(self, name: str) -> Json:
        job = copy.deepcopy(self._job)
        job["metadata"] = self._meta(name)
        for group in ("coordinator", "generation", "inference", "training"):
            spec = {"nodeSelector": dict(NOWHERE)}
            job["spec"].setdefault(group, {})["template"] = {"spec": spec}
        return job

    def _malformed(self) -> list[Post]:
        """Return a wrong or absurd job."""
        job = self._base(self._own())
        spec, template = job["spec"], job["spec"]["generation"]["template"]
        deep: Any = "end"
        for _ in range(400):
            deep = {"a": deep}
        wrong: list[tuple[Json, str, Any]] = [
            (template["spec"], "containers", {"worker": {"image": "x"}}),
            (template["spec"], "containers", ["worker", 7, None]),
            (template, "spec", "text"),
            (template, "metadata", {"labels": {"rlhf.dev/job-name": "tiny", "x": 7}}),
            (template["spec"], "volumes", deep),
            (template["spec"], "nodeSelectr", {"typo": "true"}),
            (spec["generation"], "replicas", self._choice([0, 4096, 10**12, -1])),
            (spec, "iterations", self._choice([10_000_000, 0, "many"])),
            (spec["training"], "parallelism", {"pipeline": 64, "data": 64}),
            (spec, "checkpoints", {"path": "s3://x", "onDeletion": "Save", "deletionDeadlineSeconds": 1}),
            (spec["models"], "actor", {"path": "../" * 500}),
            (job["metadata"], "name", self._choice(["x-coordinator", "tiny", "a" * 47, "default-deny"])),
        ]
        place, key, value = self._choice(wrong)
        place[key] = value
        return [Post("RLHFJob", job)]

    def _edited(self) -> list[Post]:
        """Return a large manifest that differs each time."""
        job = self._base(self._own())
        note = {"note": f"{self._count} " + "x" * LARGE}
        job["spec"]["generation"]["template"]["metadata"] = {"annotations": note}
        return [Post("RLHFJob", job, edit=True)]

    def _squat(self) -> list[Post]:
        """Return a job, and before each of the first SQUATTED jobs some objects with names that it needs."""
        self._squatted += 1
        name = f"wild-{self._squatted % (2 * SQUATTED)}"
        job = Post("RLHFJob", self._base(name))
        if self._squatted > SQUATTED:
            return [job]
        wanted = self._random.sample(self._under(name), self._random.randint(1, 3))
        return [*(Post(item["kind"], item, foreign=True) for item in wanted), job]

    def _under(self, name: str, labels: Json | None = None) -> list[Json]:
        """Return objects with the names of a job's objects."""
        more = {"labels": labels} if labels else {}
        ports = [{"name": "db", "port": 5432}]
        text = json.dumps({"spec": self._choice(LINES)[:500]})
        secret = {"stringData": {"ca.crt": "x", "ca.key": "x", "tls.crt": "x", "tls.key": "x"}}
        policy = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
        network = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy"}

        def core(kind: str, ending: str, **rest: Any) -> Json:
            return {"apiVersion": "v1", "kind": kind, "metadata": self._meta(name + ending, **more)} | rest

        return [
            core("Secret", "-certificates", **secret),
            core("Secret", "-authority", **secret),
            core("ConfigMap", "-job", data={"job.json": text}),
            core("Service", "", spec={"ports": ports}),
            core("Service", "-coordinator", spec={"ports": ports}),
            network | {"metadata": self._meta(name, **more), "spec": policy},
        ]

    def _alike(self) -> list[Post]:
        """Return an object with the labels of a job's pod, and perhaps a forged owner."""
        body = self._choice(self._under(f"alike-{self._count}", self._labels()))
        body["metadata"]["annotations"] = {"rlhf.dev/applied": self._choice(["", "x" * 5000, "0123456789abcdef"])}
        forged = self._random.random() < 0.3
        if forged:
            # Its owner is in another namespace, so the garbage collector deletes it.
            body["metadata"]["ownerReferences"] = self._owners()
        return [Post(body["kind"], body, foreign=not forged)]

    def _talks(self) -> list[Post]:
        """Return a real pod with a job's labels and a hostile last line."""
        line = self._choice(LINES).encode("utf-8", "replace").decode().replace("\x00", "")
        container = {
            "name": "worker",
            "image": self._image,
            "command": ["sh", "-c", 'printf "%s\\n" "$LINE"; exit 1'],
            "env": [{"name": "LINE", "value": line}],
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "resources": {"requests": {"cpu": "1m", "memory": "8Mi"}, "limits": {"memory": "64Mi"}},
        }
        meta = self._meta(f"talks-{self._count}", labels=self._labels())
        spec = {"containers": [container], "restartPolicy": "Never", "automountServiceAccountToken": False}
        return [Post("Pod", {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})]
