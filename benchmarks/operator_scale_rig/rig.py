"""One cluster of a scenario: real control plane, fake nodes, a bare client, and the operator as a separate process.

Rule: the operator is started with its command line and observed from outside: /proc, its metrics, the API server.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Self

import yaml
from benchmarks.operator_scale_rig import processor_time
from benchmarks.operator_scale_rig.bare_client import BareClient
from benchmarks.operator_scale_rig.jobs import ROOT, job, objects
from benchmarks.operator_scale_rig.progress import Progress
from benchmarks.process_tree import cpu_seconds
from tests.cluster import Cluster
from tests.cluster.kwok import TAINT
from tests.cluster.operator_process import OperatorProcess

from rlhf_common import names

Json = dict[str, Any]
PODS_A_NODE = 150
"""Number of pods for which one fake node is added."""
LONGEST_SECONDS = 1800.0
"""Time-out of `until` and of the operator's start."""
NAMESPACE = "scale"
OPERATOR_USER = "rlhf-operator"


@dataclass(frozen=True)
class Spent:
    """Time that a process has used so far."""

    at: float
    cpu_seconds: float

    def since(self, before: Spent) -> tuple[float, float]:
        """Return (wall seconds, CPU seconds) since `before`."""
        return self.at - before.at, self.cpu_seconds - before.cpu_seconds


class Rig:
    """Within `async with`, a cluster ready for a scenario; `start_operator` starts the operator."""

    def __init__(
        self,
        *,
        pods: int,
        concurrency: int,
        audit: bool = False,
        bare: bool = False,
        operator: Sequence[str] = (),
        addresses: str = "",
    ) -> None:
        """Prepare a cluster for at most `pods` pods; `audit` makes the API server record every request of the
        operator.

        `bare` means only etcd and API server, so that pods stay pending. `addresses` is the network of fake pods.
        """
        self._addresses = addresses
        self._nodes = 0 if bare else max(2, -(-pods // PODS_A_NODE))
        self._arguments = operator
        self.concurrency = concurrency
        self._audit = audit
        self._requests: Counter[str] = Counter()
        self._read = 0
        self._raws = 0
        self._renewals: list[datetime] = []
        self._renewing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        arguments = {"kwok": [f"--cidr={self._addresses}"]} if self._addresses else {}
        self._folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"operator-scale-{os.getpid()}"
        self._folder.mkdir(exist_ok=True)
        self._log = self._folder / "audit.log"
        if self._audit:
            policy = self._folder / "policy.yaml"
            rules = [
                {"level": "Metadata", "users": [OPERATOR_USER], "omitStages": ["RequestReceived"]},
                {"level": "None"},
            ]
            policy.write_text(yaml.safe_dump({"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": rules}))
            arguments["kube-apiserver"] = [f"--audit-policy-file={policy}", f"--audit-log-path={self._log}"]
        level = "control-plane" if self._nodes else "api"
        self.cluster = Cluster(level=level, component_args=arguments).start()
        self.cluster.define(ROOT / "crds" / "rlhfjobs.yaml")
        if self._nodes:
            self.cluster.add_kwok_nodes(self._nodes)
            self.cluster.kubectl("taint", "nodes", "--all", f"{TAINT['key']}-")
        self.cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        kubeconfig = self.cluster.user(OPERATOR_USER, "system:masters")
        self.operator = OperatorProcess(self.cluster, *self._arguments, kubeconfig=kubeconfig)
        self.client = BareClient(self.cluster.kubeconfig, self.concurrency * 2)
        await self.client.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.stop_operator()
        await self.client.__aexit__()
        self.cluster.stop(failed=kind is not None)
        for path in self._folder.iterdir():
            path.unlink()
        self._folder.rmdir()

    def start_operator(self) -> None:
        """Start the operator; return when it leads."""
        self.operator.start(LONGEST_SECONDS)
        self._renewals = []
        self._renewing = asyncio.create_task(self._watch_lease())

    async def stop_operator(self) -> None:
        """Stop the operator if it runs; keep the observations of its Lease."""
        if self._renewing is not None:
            self._renewing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._renewing
        self.operator.stop()

    async def _watch_lease(self) -> None:
        async for event in self.client.watch("Lease", "default", names.lease_name("")):
            if renewed := (event["object"].get("spec") or {}).get("renewTime"):
                self._renewals.append(datetime.fromisoformat(renewed))

    def lease(self) -> Json:
        """Return how regularly the last operator renewed its Lease. Raises AssertionError if it has crashed."""
        self.operator.check()
        between = [(after - before).total_seconds() for before, after in itertools.pairwise(self._renewals)]
        return {"lease_renewals": len(between), "lease_longest_gap_seconds": max(between, default=0.0)}

    async def warm_up(self) -> float:
        """Run one small job through the operator and delete it; return the seconds until its pods existed."""
        begun = time.perf_counter()
        stored = await self.client.create(job("default", "warm"))
        await self.until_count("warm-up", "Pod", "default", 4)
        seconds = time.perf_counter() - begun
        assert stored["metadata"]["uid"]
        await self._cleared("default")
        return seconds

    async def until(self, event: str, holds: Callable[[], Awaitable[bool]], every: float = 0.05) -> None:
        """Wait until `holds`. Raises TimeoutError naming `event`."""
        deadline = time.monotonic() + LONGEST_SECONDS
        while not await holds():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{event} did not happen within {LONGEST_SECONDS:.0f} s")
            await asyncio.sleep(every)

    async def until_count(self, event: str, kind: str, namespace: str, count: int, every: float = 0.05) -> None:
        """Wait until a namespace has exactly `count` objects of a kind."""
        progress = Progress(event, count)

        async def reached() -> bool:
            result = await self.client.count(kind, namespace)
            progress.at(result)
            return result == count

        await self.until(f"{event}: {count} objects {kind}", reached, every)

    async def until_gone(self, kind: str, namespace: str, left: int = 0) -> None:
        """Wait until deletions of a kind are done."""

        async def gone() -> bool:
            return await self.client.count(kind, namespace) == left

        await self.until(f"the end of all objects {kind} in {namespace}", gone, 0.25)

    async def until_running(self, namespace: str) -> None:
        """Wait until all pods of a namespace are Running; return immediately without nodes."""
        if not self._nodes:
            return

        async def running() -> bool:
            return await self.client.none("Pod", namespace, "status.phase!=Running")

        await self.until(f"pods of {namespace} to be Running", running, 0.25)

    def spent(self) -> Spent:
        """Return the operator's time so far."""
        return Spent(time.perf_counter(), cpu_seconds(self.operator.pid))

    def used(self) -> dict[str, float]:
        """Return the processor time so far, by process."""
        return processor_time.seconds(self.cluster, self.operator.pid if self.operator.runs() else None)

    def memory_mb(self, field: str = "VmRSS") -> float:
        """Return the current memory of the operator, or its peak (VmHWM), in MiB."""
        lines = Path(f"/proc/{self.operator.pid}/status").read_text().splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith(field))) / 1024

    def requests(self) -> Counter[str]:
        """Return `verb resource` -> the operator's answered requests, and stages of its watches; needs `audit`."""
        with self._log.open() as lines:
            lines.seek(self._read)
            for line in lines:
                if not line.endswith("\n"):
                    break  # the line is still being written
                self._read += len(line.encode())
                entry = json.loads(line)
                reference = entry.get("objectRef") or {}
                sub = f"/{reference['subresource']}" if "subresource" in reference else ""
                if entry["stage"] == "ResponseComplete" or entry["verb"] == "watch":
                    self._requests[f"{entry['verb']} {reference.get('resource', entry['requestURI'])}{sub}"] += 1
        return self._requests.copy()

    async def raw_limit(self, jobs: int, pods: int, *methods: str) -> Json:
        """Measure a bare client with the objects of `jobs` jobs of `pods` pods, by `methods` (default: both).

        The operator does not run. The scheduler and the fake nodes process these pods like the operator's.
        """
        result: Json = {}
        await self._raw("warm-up", "apply", 2, 20)
        for method in methods or ("post", "apply"):
            count, seconds, item = await self._raw(f"raw {method}", method, jobs, pods)
            result |= {"objects": count, f"{method}_objects_per_second": count / seconds}
            result |= {f"{method}_pods_per_second": jobs * pods / seconds, f"{method}_cpu_ms_per_pod": item}
        return result

    async def _raw(self, description: str, method: str, jobs: int, pods: int) -> tuple[int, float, dict[str, float]]:
        """Return (objects, seconds until the last answer, processor time per pod by process until all pods ran)."""
        self._raws += 1
        namespace = f"raw-{self._raws}-{method}"
        self.cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        created = []
        for number in range(jobs):
            created += objects(await self.client.create(job(namespace, f"job-{number}", pods=pods, suspend=True)))
        # Objects that pods need come first, as in the operator.
        created.sort(key=lambda each: each["kind"] == "Pod")
        progress, done = Progress(description, len(created)), 0

        async def counted(ask: Callable[[], Awaitable[bytes]]) -> None:
            nonlocal done
            await ask()
            done += 1
            progress.at(done)

        asks = self.client.posts(created) if method == "post" else self.client.applies(created)
        before = self.used()
        seconds = await self.client.all_at_once([partial(counted, ask) for ask in asks], self.concurrency)
        await self.until_running(namespace)
        each = processor_time.milliseconds_each(before, self.used(), jobs * pods)
        await self._cleared(namespace)
        return len(created), seconds, each

    async def _cleared(self, namespace: str) -> None:
        """Delete a namespace's jobs and their objects; the garbage collector deletes the objects if there is one."""
        await self.client.delete_all(names.KIND, namespace)
        for kind in ("Pod",) if self._nodes else ("Pod", "ConfigMap", "NetworkPolicy", "Secret"):
            await self.client.delete_all(kind, namespace)
        # One ConfigMap of a namespace belongs to the cluster.
        for kind, left in (("Pod", 0), ("ConfigMap", 1 if self._nodes else 0), ("NetworkPolicy", 0)):
            await self.until_gone(kind, namespace, left)
