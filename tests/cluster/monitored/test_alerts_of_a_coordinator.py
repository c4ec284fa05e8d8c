"""Alerts on faults that cannot be caused in a cluster within seconds, on a real coordinator with simulated workers.

The faults: moves that are refused, a sample that fails everywhere, wrong drafts, changing costs, a mismatch, a disk
that fills, a certificate that expires. Rule: the coordinator is the code of a job, over real gRPC with its real metrics
endpoint; the workers are test doubles. Prometheus, Alertmanager and the queries are the real ones, with short times set
by values.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.monitored.firing_alerts import PATIENCE, FiringAlerts, at_once, documented
from tests.support.coordinator.coordinated import Coordinated, make_job
from tests.support.coordinator.simulated_rank import Pace
from tests.support.coordinator.simulated_worker import crew

from rlhf_common.endpoint import Endpoint
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.service.prometheus import prometheus_application
from rlhf_operator.certificates import new_authority

pytestmark = pytest.mark.full


SHORT: dict[str, dict[str, Any]] = {
    "RLHFMigrationFailing": {"failures": 1, "share": 0.5, "windowSeconds": 6},
    "RLHFSamplesFailing": {"failures": 1, "windowSeconds": 6},
    "RLHFFusionMispredicted": {"ratio": 1.5, "windowSeconds": 3},
    "RLHFSpeculationUseless": {"share": 0.1, "steps": 0.2, "tokens": 100, "windowSeconds": 6},
    "RLHFDiskNearlyFull": {"freeRatio": 0.1, "checkpoints": 0},
    "RLHFDiskFillingUp": {"withinSeconds": 300, "windowSeconds": 15, "freeRatio": 0.9},
}
OF_JOB = {"namespace": "team", "rlhf_job": "simulated"}
DISK_MIB = 256
"""Size of the disk in MiB: 7% of it is more than the run writes while the test waits for the alert of a full disk."""
DAY = timedelta(days=1)


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Yield a separate file system of DISK_MIB."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def scrape(endpoint: Endpoint) -> dict[str, Any]:
    """Return the coordinator as a target, with the labels of a scrape of its pod."""
    return {"job_name": "rlhf", "static_configs": [{"targets": [f"127.0.0.1:{endpoint.port}"], "labels": OF_JOB}]}


class Watched:
    """The job, its possible faults, and its alerts."""

    def __init__(self, alerts: FiringAlerts, run: JobRun, pace: Pace, disk: Path, certificates: Path) -> None:
        self.alerts, self._run, self.pace, self.disk, self._certificates = alerts, run, pace, disk, certificates
        self.prediction = 1.0
        """Predicted time as a share of the previous iteration's."""

    def will_predict(self, share: float) -> None:
        """Set the predicted share of the previous iteration's time."""
        self.prediction = share

    def certificate(self, lifetime: timedelta) -> None:
        """Give the job's processes a certificate with this lifetime."""
        now = datetime.now(UTC)
        issued = new_authority("simulated", now).issue(["simulated"], now, lifetime)
        issued.write(self._certificates)

    async def predict(self) -> None:
        """Replace the prediction of each iteration, because simulated workers cannot be predicted."""
        fusion = self._run.state.fusion
        while True:
            before = self._run.last_metrics.get("seconds/generation_and_inference", 1.0)
            fusion.choice = replace(fusion.choice, seconds=self.prediction * before)
            await asyncio.sleep(0.005)

    async def fault(self, name: str, begin: Callable[[], None], end: Callable[[], None]) -> None:
        """Cause a fault, wait for its alert, undo it, and wait until the alert is over."""
        # A busy machine is a fault as well: an iteration that it holds up takes longer than predicted.
        await asyncio.to_thread(self.alerts.until_quiet, name, **OF_JOB)
        begin()
        await asyncio.to_thread(self.alerts.until_firing, name, **OF_JOB)
        end()
        await asyncio.to_thread(self.alerts.until_over, name, **OF_JOB)


@asynccontextmanager
async def watched(cluster: Cluster, folder: Path) -> AsyncIterator[Watched]:
    """Yield a long job with four simulated generation workers, whose tails move."""
    fusion = {
        "intraStage": {"mode": "Disabled"},
        "interStage": {"mode": "Fixed", "threshold": 5, "pool": 1, "transfer": "KV"},
    }
    pace = Pace(tokens_per_tick=2, training_metrics={"actor/mismatch": 0.004}, draft_acceptance=0.6)
    with small_disk(folder / "disk") as disk:
        shape: Mapping[str, Any] = {"iterations": 100000, "batch": 24, "every": 50, "inference": {"replicas": 1}}
        generation = {"replicas": 4, "maxBatchSize": 6}
        rollout = {"batchSize": 24, "maxResponseTokens": 48, "maxFailedSamples": 1}
        job = make_job(folder, fusion=fusion, generation=generation, checkpoints=None, rollout=rollout, **shape)
        coordinated = Coordinated(job, disk / "run")
        run = coordinated.start()
        endpoint, certificates = Endpoint("127.0.0.1", 0), folder / "certificates"
        endpoint.metrics = prometheus_application(run, certificates)
        alerts = FiringAlerts(cluster, folder, at_once(SHORT), [scrape(endpoint)], coordinated.check)
        result = Watched(alerts, run, pace, disk, certificates)
        result.certificate(365 * DAY)
        workers = crew(dict(coordinated.counts()), coordinated.address, pace=pace)
        predicting = asyncio.create_task(result.predict())
        try:
            await coordinated.until("Generating", 8, PATIENCE)
            await asyncio.to_thread(alerts.monitoring.start)
            yield result
        finally:
            predicting.cancel()
            await asyncio.to_thread(alerts.monitoring.stop)
            await coordinated.cancel()
            await workers.end(1.0)
            endpoint.close()


async def test_each_fires_on_its_fault_and_is_over_with_it(api_cluster: Cluster, tmp_path: Path) -> None:
    async with watched(api_cluster, tmp_path) as job:
        await asyncio.gather(_training(job), _disk(job), _certificate(job))
        assert job.alerts.fired == documented(Path(__file__).name)


async def _training(job: Watched) -> None:
    healthy, pace = dict(job.pace.training_metrics), job.pace

    def disagree() -> None:
        pace.training_metrics = {"actor/mismatch": 0.2}

    def agree() -> None:
        pace.training_metrics = healthy

    def refuse() -> None:
        pace.fail_migrate = lambda source, sample: "refused"

    def take() -> None:
        pace.fail_migrate = None

    def break_one() -> None:
        pace.fail_decode = lambda worker, key: "refused" if key.sample == 3 else None

    def decode() -> None:
        pace.fail_decode = None

    def draft_badly() -> None:
        pace.draft_acceptance = 0.01

    def draft_well() -> None:
        pace.draft_acceptance = 0.6

    await job.fault("RLHFMismatchHigh", disagree, agree)
    await job.fault("RLHFSamplesFailing", break_one, decode)
    await job.fault("RLHFMigrationFailing", refuse, take)
    await job.fault("RLHFSpeculationUseless", draft_badly, draft_well)
    await job.fault("RLHFFusionMispredicted", lambda: job.will_predict(0.2), lambda: job.will_predict(1.0))


async def _disk(job: Watched) -> None:
    filler = job.disk / "filler"

    def fill(share: float) -> None:
        """Fill the disk to this share, including the run's growing files; the job needs the rest."""
        space = os.statvfs(job.disk)
        more = int(share * DISK_MIB * 2**20) - (space.f_blocks - space.f_bavail) * space.f_frsize
        with filler.open("ab") as file:
            size = max(file.tell() + more, 1)
            file.truncate(min(size, file.tell()))
            os.posix_fallocate(file.fileno(), 0, size)

    async def grow() -> None:
        for step in range(160):
            fill(0.1 + 0.005 * step)
            await asyncio.sleep(1)

    growing: list[asyncio.Task[None]] = []

    def empty() -> None:
        growing[0].cancel()
        fill(0.0)

    await job.fault("RLHFDiskFillingUp", lambda: growing.append(asyncio.create_task(grow())), empty)
    await job.fault("RLHFDiskNearlyFull", lambda: fill(0.93), filler.unlink)


async def _certificate(job: Watched) -> None:
    await job.fault("RLHFCertificateExpiring", lambda: job.certificate(DAY), lambda: job.certificate(365 * DAY))
