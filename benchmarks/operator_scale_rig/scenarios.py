"""The scenarios: each starts its own cluster, measures, and returns one flat dict of figures.

Rule: times of pods are those of objects in the API server, polled or watched, never those that the operator reports.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from benchmarks.operator_scale_rig import coordinators, processor_time
from benchmarks.operator_scale_rig.bare_client import place
from benchmarks.operator_scale_rig.jobs import FEWEST_PODS, job
from benchmarks.operator_scale_rig.rig import NAMESPACE, Rig

from rlhf_common import names

Json = dict[str, Any]
QUIET_SECONDS = 3.0
"""Seconds without a request except for the Lease, after which the operator counts as settled."""
RAW_PODS = 1000
"""Maximum number of pods for the raw limit in S2 and S3."""
KILLS = 5
WORKING_PODS = 5
"""Number of pods of each job of S8."""
WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})


@dataclass(frozen=True)
class RigSettings:
    """Settings that a user may choose; printed with the results."""

    scale: float = 1.0
    """Factor for numbers of jobs and pods."""
    concurrency: int = 32
    """Concurrent requests of the bare client."""
    idle_seconds: float = 330.0
    """Seconds of S4's window."""
    bare: bool = False
    """Whether only etcd and API server run in scenarios that can do without nodes. Otherwise controllers, scheduler and
    fake nodes share the cores.
    """
    operator: tuple[str, ...] = ()
    """Further arguments of the operator."""

    def scaled(self, number: int, least: int = 1) -> int:
        """Return `number` times the scale, at least `least`."""
        return max(least, round(number * self.scale))

    def rig(self, pods: int, *, audit: bool = False, nodes: bool = False, addresses: str = "") -> Rig:
        """Return a cluster for a scenario; `nodes` if it always needs some; `addresses` is the network of fake pods."""
        return Rig(
            pods=pods,
            concurrency=self.concurrency,
            audit=audit,
            bare=self.bare and not nodes,
            operator=self.operator,
            addresses=addresses,
        )


async def one_big_job(settings: RigSettings) -> Json:
    """S1: one job with 1,000 pods, and the time that a small job waits at the same time."""
    pods = settings.scaled(1000, 8)
    async with settings.rig(pods * 2) as rig:
        raw = await rig.raw_limit(1, pods)
        rig.start_operator()
        await rig.warm_up()
        alone = await _small(rig, "small-alone")
        watch = _Watch(rig, pods)
        await rig.client.create(job(NAMESPACE, "big", pods=pods))
        beside = asyncio.create_task(_beside(rig, pods))
        await rig.until_count("S1", "Pod", NAMESPACE, pods)
        watch.exist()
        waited = await beside
        result = await watch.run()
        raw = await _raw_again(rig, raw, 1, pods)
    result |= {"small_job_alone_seconds": alone, "small_job_beside_seconds": waited}
    return result | _ratios(result["pods_per_second"], raw)


class _Watch:
    """Observes the operator while it makes pods."""

    def __init__(self, rig: Rig, pods: int) -> None:
        """Prepare for `pods` pods."""
        self._rig, self._pods = rig, pods
        self._used, self._before, self._begun = rig.used(), rig.spent(), time.perf_counter()

    def exist(self) -> None:
        """Record that all pods exist."""
        self._seconds = time.perf_counter() - self._begun
        self._spent = self._rig.spent().since(self._before)[1]

    async def run(self) -> Json:
        """Wait until the pods run; return rates, processor time by process, and the operator's memory."""
        await self._rig.until_running(NAMESPACE)
        running, used = time.perf_counter() - self._begun, self._rig.used()
        result: Json = {"pods": self._pods, "seconds": self._seconds, "running_seconds": running}
        result |= {"pods_per_second": self._pods / self._seconds, "operator_cpu_seconds": self._spent}
        result |= {"pods_per_operator_cpu_second": self._pods / self._spent}
        result |= {"cpu_ms_per_pod": processor_time.milliseconds_each(self._used, used, self._pods)}
        result |= {"operator_memory_mb": self._rig.memory_mb(), "operator_memory_peak_mb": self._rig.memory_mb("VmHWM")}
        return result | self._rig.lease()


async def _raw_again(rig: Rig, raw: Json, jobs: int, pods: int) -> Json:
    """Return `raw` with a second measurement by apply, after the operator's; its rate is the mean of the two."""
    await rig.stop_operator()
    again = await rig.raw_limit(jobs, pods, "apply")
    both = [raw["apply_pods_per_second"], again["apply_pods_per_second"]]
    reported = {"apply_pods_per_second_before": both[0], "apply_pods_per_second_after": both[1]}
    return raw | reported | {"apply_pods_per_second": statistics.mean(both)}


async def _beside(rig: Rig, pods: int) -> float:
    """Return the seconds until the pods of a small job exist that comes when a fifth of the big one's pods exist."""

    async def begun() -> bool:
        return await rig.client.count("Pod", NAMESPACE) >= pods / 5

    await rig.until("the big job to begin", begun)
    return await _small(rig, "small-beside")


async def _small(rig: Rig, name: str) -> float:
    rig.cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    begun = time.perf_counter()
    await rig.client.create(job(name, "small"))
    await rig.until_count(name, "Pod", name, FEWEST_PODS)
    return time.perf_counter() - begun


async def many_jobs(settings: RigSettings) -> Json:
    """S2: 1,000 jobs of four pods, created as fast as the API server accepts them."""
    jobs = settings.scaled(1000, 2)
    shape = min(jobs, RAW_PODS // FEWEST_PODS), FEWEST_PODS
    async with settings.rig(jobs * FEWEST_PODS) as rig:
        raw = await rig.raw_limit(*shape)
        rig.start_operator()
        await rig.warm_up()
        posts = rig.client.posts([job(NAMESPACE, f"job-{item}") for item in range(jobs)])
        watch, begun = _Watch(rig, jobs * FEWEST_PODS), time.perf_counter()
        posting = asyncio.create_task(rig.client.all_at_once(posts, rig.concurrency))
        await rig.until_count("S2", "Pod", NAMESPACE, jobs * FEWEST_PODS)
        watch.exist()
        seconds, posted = time.perf_counter() - begun, await posting
        result = await watch.run()
        raw = await _raw_again(rig, raw, *shape)
    result |= {"jobs": jobs, "jobs_per_second": jobs / seconds, "jobs_posted_in_seconds": posted}
    result |= {"objects_per_second": jobs * raw["objects"] / shape[0] / seconds}
    return result | _ratios(result["pods_per_second"], raw)


async def resize(settings: RigSettings) -> Json:
    """S3: 100 jobs grow by 100 generation pods each at once, from 1, which the API requires in a running job."""
    jobs, more = settings.scaled(100, 2), settings.scaled(100, 4)
    start, shape = jobs * FEWEST_PODS, (1, min(RAW_PODS, jobs * more))
    async with settings.rig(jobs * (FEWEST_PODS + more)) as rig:
        raw = await rig.raw_limit(*shape)
        rig.start_operator()
        await rig.client.all_at_once(
            rig.client.posts([job(NAMESPACE, f"job-{item}") for item in range(jobs)]), rig.concurrency
        )
        await rig.until_count("S3, before", "Pod", NAMESPACE, start)
        await rig.until_running(NAMESPACE)
        body = json.dumps({"spec": {"replicas": 1 + more}}).encode()
        headers = {"Content-Type": "application/merge-patch+json"}
        where, watch = place(names.KIND, NAMESPACE), _Watch(rig, jobs * more)

        def scale(number: int) -> Callable[[], Awaitable[bytes]]:
            return lambda: rig.client.ask("PATCH", f"{where}/job-{number}/scale", body, headers=headers)

        await rig.client.all_at_once([scale(item) for item in range(jobs)], rig.concurrency)
        await rig.until_count("S3", "Pod", NAMESPACE, start + jobs * more)
        watch.exist()
        result = await watch.run()
        raw = await _raw_again(rig, raw, *shape)
    return {"jobs": jobs} | result | _ratios(result["pods_per_second"], raw)


def _ratios(rate: float, raw: Json) -> Json:
    """Return the operator's pods per second relative to a bare client's for the same objects."""
    ratios = {f"ratio_to_raw_{item}": rate / raw[f"{item}_pods_per_second"] for item in ("apply", "post")}
    return ratios | {f"raw_{name}": value for name, value in raw.items()}


async def idle_then_restart(settings: RigSettings) -> Json:
    """S4 and S6: 5,000 waiting jobs (spec.suspend), observed for a while; then the operator restarts."""
    jobs = settings.scaled(5000, 10)
    async with settings.rig(0, audit=True) as rig:
        rig.start_operator()
        posts = rig.client.posts([job(NAMESPACE, f"job-{item}", suspend=True) for item in range(jobs)])
        first, begun = rig.spent(), time.perf_counter()
        await rig.client.all_at_once(posts, rig.concurrency)
        await _settled(rig)
        taken, (_, cpu) = time.perf_counter() - begun - QUIET_SECONDS, rig.spent().since(first)
        result = {"jobs": jobs, "taken_on_seconds": taken, "taken_on_cpu_seconds": cpu}
        result |= await _idle(rig, settings.idle_seconds) | rig.lease()
        await rig.stop_operator()
        before, begun = rig.requests(), time.perf_counter()
        rig.start_operator()
        leads = time.perf_counter() - begun
        await _settled(rig)
        result["restart_settled_seconds"] = time.perf_counter() - begun - QUIET_SECONDS
        result["restart_leads_seconds"] = leads
        result["restart_cpu_seconds"] = rig.spent().cpu_seconds
        result |= _request_figures("restart", rig.requests() - before)
        result["restart_memory_mb"] = rig.memory_mb()
        result |= {f"restart_{name}": value for name, value in rig.lease().items()}
    return result


async def _idle(rig: Rig, seconds: float) -> Json:
    """Return requests, CPU and memory of an idle operator."""
    asked, before = rig.requests(), rig.spent()
    await asyncio.sleep(seconds)
    wall, cpu = rig.spent().since(before)
    asked = rig.requests() - asked
    result: Json = {"idle_seconds": wall, "idle_cpu_share": cpu / wall}
    result |= {"idle_memory_mb": rig.memory_mb(), "idle_memory_peak_mb": rig.memory_mb("VmHWM")}
    return result | _request_figures("idle", asked) | {"idle_requests_per_second": sum(asked.values()) / wall}


def _request_figures(when: str, asked: Counter[str]) -> Json:
    """Return requests by kind, with those for the Lease separate."""
    lease = sum(count for request, count in asked.items() if request.endswith(" leases"))
    others = {request: count for request, count in sorted(asked.items()) if not request.endswith(" leases")}
    writes = sum(count for request, count in others.items() if request.split()[0] in WRITES)
    return {f"{when}_requests": others, f"{when}_writes": writes, f"{when}_lease_requests": lease}


async def _settled(rig: Rig) -> None:
    """Wait until the operator requests only its Lease and uses under a fifth of a core for QUIET_SECONDS."""
    quiet, last = 0.0, None
    while quiet < QUIET_SECONDS:
        before = rig.spent()
        await asyncio.sleep(0.5)
        wall, cpu = rig.spent().since(before)
        asked = sum(count for request, count in rig.requests().items() if not request.endswith(" leases"))
        quiet = quiet + wall if asked == last and cpu < 0.2 * wall else 0.0
        last = asked


async def one_killed(settings: RigSettings) -> Json:
    """S5: one pod of 1,024 is deleted, or fails, several times; time until its successor exists, and runs."""
    pods = settings.scaled(1024, 8)
    times: dict[str, list[float]] = {"deleted": [], "deleted_running": [], "failed": [], "failed_running": []}
    async with settings.rig(pods, nodes=True) as rig:
        rig.start_operator()
        await rig.client.create(job(NAMESPACE, "big", pods=pods))
        await rig.until_count("S5, before", "Pod", NAMESPACE, pods)
        await rig.until_running(NAMESPACE)
        await asyncio.sleep(5)
        for number in range(KILLS):
            for turn, how in enumerate(("deleted", "failed")):
                # Each pod has its own name: a second failure of one is delayed on purpose.
                name = f"big-generation-{((2 * number + turn) * 97) % (pods - 3)}"
                created, running = await _replaced(rig, name, failed=how == "failed")
                times[how].append(created)
                times[f"{how}_running"].append(running)
    result: Json = {"pods": pods, "replaced": sum(len(times[how]) for how in ("deleted", "failed"))}
    for how, seconds in times.items():
        result |= {f"{how}_median_seconds": statistics.median(seconds), f"{how}_worst_seconds": max(seconds)}
    return result


async def _replaced(rig: Rig, name: str, *, failed: bool) -> tuple[float, float]:
    """Return (seconds until another pod of the name exists, until it runs) after its end."""
    path = f"{place('Pod', NAMESPACE)}/{name}"
    uid = json.loads(await rig.client.ask("GET", path))["metadata"]["uid"]
    begun, created = time.perf_counter(), 0.0
    seen = asyncio.create_task(_watched(rig, name, uid))
    await asyncio.sleep(0.2)
    begun = time.perf_counter()
    if failed:
        status = {"status": {"phase": "Failed", "reason": "Broken", "message": "ended by the benchmark"}}
        headers = {"Content-Type": "application/merge-patch+json"}
        await rig.client.ask("PATCH", f"{path}/status", json.dumps(status).encode(), headers=headers)
    else:
        await rig.client.ask("DELETE", path)
    created, running = await asyncio.wait_for(seen, 120)
    return created - begun, running - begun


async def _watched(rig: Rig, name: str, uid: str) -> tuple[float, float]:
    """Return the times at which another pod of the name existed, and ran."""
    created = 0.0
    async for event in rig.client.watch("Pod", NAMESPACE, name):
        body = event["object"]
        if body["metadata"]["uid"] != uid:
            created = created or time.perf_counter()
            if body.get("status", {}).get("phase") == "Running":
                return created, time.perf_counter()
    raise RuntimeError(f"the watch of {name} ended")


async def unreachable(settings: RigSettings) -> Json:
    """S7: running jobs whose coordinators are unreachable, like those of fake pods; cost of the operator."""
    jobs = settings.scaled(500, 2)
    async with settings.rig(jobs * FEWEST_PODS, audit=True, nodes=True) as rig:
        rig.start_operator()
        posts = rig.client.posts([job(NAMESPACE, f"job-{item}") for item in range(jobs)])
        await rig.client.all_at_once(posts, rig.concurrency)
        await rig.until_count("S7, before", "Pod", NAMESPACE, jobs * FEWEST_PODS)
        await rig.until_running(NAMESPACE)
        await asyncio.sleep(30)
        result = await _idle(rig, 60.0)
    share = result["idle_cpu_share"]
    return {"jobs": jobs, "cpu_milliseconds_per_job_and_second": share * 1000 / jobs} | {
        name.replace("idle", "unreachable"): value for name, value in result.items()
    }


async def at_work(settings: RigSettings) -> Json:
    """S8: 200 running jobs of 5 pods whose coordinators answer; cost of the operator while nothing happens."""
    jobs = settings.scaled(200, 2)
    async with settings.rig(jobs * WORKING_PODS, audit=True, nodes=True, addresses=coordinators.ADDRESSES) as rig:
        rig.start_operator()
        posts = rig.client.posts([job(NAMESPACE, f"job-{item}", pods=WORKING_PODS) for item in range(jobs)])
        await rig.client.all_at_once(posts, rig.concurrency)
        await rig.until_count("S8, before", "Pod", NAMESPACE, jobs * WORKING_PODS)
        await rig.until_running(NAMESPACE)
        secrets = await coordinators.secrets_by_address(rig.client, NAMESPACE)
        with coordinators.answering(secrets, WORKING_PODS - FEWEST_PODS + 1):
            await asyncio.sleep(90)
            result = await _idle(rig, 120.0)
            running = json.loads(await rig.client.ask("GET", place(names.KIND, NAMESPACE)))["items"]
    phases = Counter(_reason(item, "Running") for item in running)
    return {"jobs": jobs, "pods": jobs * WORKING_PODS, "phases": dict(phases)} | {
        name.replace("idle", "at_work"): value for name, value in result.items()
    }


def _reason(stored: Json, kind: str) -> str:
    return next(str(each["reason"]) for each in stored["status"]["conditions"] if each["type"] == kind)


SCENARIOS: dict[str, tuple[str, Callable[[RigSettings], Coroutine[Any, Any, Json]]]] = {
    "S1": ("one job with 1,000 pods", one_big_job),
    "S2": ("1,000 jobs of 4 pods", many_jobs),
    "S3": ("100 jobs resized by 100 generation pods each", resize),
    "S4": ("5,000 waiting jobs, and S6: the operator restarted with them", idle_then_restart),
    "S5": ("one pod of 1,024 killed", one_killed),
    "S7": ("500 running jobs whose coordinators cannot be reached", unreachable),
    "S8": ("200 running jobs of 5 pods whose coordinators answer", at_work),
}
