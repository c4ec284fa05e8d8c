"""Alerts on real faults: each alert reaches Alertmanager and is over when its fault is.

A job trains in pods of a real node, and a real Prometheus evaluates the chart's rules on its scrapes. Rule: thresholds
and times are shortened with values that users have too; queries are those of the chart. test_alerts_of_a_coordinator.py
covers faults that cannot be caused in a cluster within seconds.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster import environment, images
from tests.cluster.cluster import Cluster
from tests.cluster.fixture import own_cluster
from tests.cluster.jobs_in_pods.gated_job import NAME, OPEN
from tests.cluster.monitored.alerted_job import AlertedJob, WatchedOperators
from tests.cluster.monitored.firing_alerts import PATIENCE, FiringAlerts, at_once, documented
from tests.cluster.monitored.monitoring import SCRAPE
from tests.cluster.operator_process import OperatorProcess
from tests.cluster.processes import wait_until

from rlhf_common.names import COORDINATOR_PORT

pytestmark = pytest.mark.full


ROOT = Path(__file__).parents[3]
NAMESPACE = "team"
SILENT_SECONDS = 80
"""Seconds of silence. Bookmarks come every minute or two, so the test gives watches an event just before the API server
falls silent.
"""
JOBS = next(item for item in SCRAPE if item["job_name"] == "rlhf-jobs")
NO_PROGRESS_SECONDS = 24
ITERATIONS_OF_PROGRESS = 4
"""Iterations that last longer than NO_PROGRESS_SECONDS if the machine is slow, so that the job is then only slow as
well.
"""
MOST_SECONDS = 200
"""Longest time without progress in seconds, well below the wait for the alert. An iteration that a lost worker delayed
is not representative.
"""
SHORT: dict[str, dict[str, Any]] = {
    "RLHFJobNotStarting": {"startSeconds": 5},
    "RLHFJobUnschedulable": {"unschedulableSeconds": 3},
    "RLHFJobQueued": {"queuedSeconds": 3},
    "RLHFJobStuck": dict.fromkeys(("generatingSeconds", "scoringSeconds", "recoveringSeconds"), 6),
    "RLHFJobNoProgress": {"windowSeconds": NO_PROGRESS_SECONDS},
    "RLHFJobRecoveringRepeatedly": {"failures": 1, "windowSeconds": 20},
    "RLHFJobFailed": {"windowSeconds": 600},
    "RLHFRewardFailing": {"failures": 2, "windowSeconds": 15},
    "RLHFRewardCollapsed": {"deviations": 2, "recentSeconds": 3, "windowSeconds": 120},
    "RLHFKLRunaway": {"natsPerToken": 0.005},
    "RLHFNonfiniteSteps": {"steps": 1, "windowSeconds": 15},
    "RLHFGPUIdle": {"share": 0.97, "windowSeconds": 8, "gpus": 0},
    "RLHFCheckpointOverdue": {"for": "2s"},
    "RLHFCheckpointFailing": {"windowSeconds": 15},
    "RLHFOperatorQueueOld": {"ageSeconds": 3},
    "RLHFOperatorWatchStale": {"ageSeconds": SILENT_SECONDS},
    "RLHFOperatorErrors": {"errors": 0, "windowSeconds": 20},
}
OF_JOB = {"namespace": NAMESPACE, "rlhf_job": NAME}
WAITING = {"RLHFJobUnschedulable": "nowhere", "RLHFJobNotStarting": "lacking", "RLHFJobQueued": "queued"}
"""Alert -> the job that it is about."""


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Yield a separate cluster with a real node, because its API server is frozen for a while."""
    with own_cluster(request, level="node", images=[images.mounted(Path(environment.PYTHON).parent)]) as running:
        for definition in (ROOT / "crds" / "rlhfjobs.yaml", Path(__file__).parents[1] / "crds" / "kueue.yaml"):
            running.define(definition)
        yield running


def test_each_alert_fires_on_its_fault_and_is_over_with_it(cluster: Cluster, tmp_path: Path) -> None:
    image = images.MOUNTED
    arguments = (f"--coordinator-image={image}", f"--worker-image={image}", "--concurrency=1")
    operators = WatchedOperators(cluster, tmp_path, *arguments)
    job = AlertedJob(cluster, NAMESPACE, tmp_path / "job", cluster.nodes["n1"])
    alerts = FiringAlerts(cluster, tmp_path, at_once(SHORT), [JOBS, operators.scrape], operators.keep)
    with alerts.monitoring:
        try:
            AlertedFaults(cluster, job, operators, alerts).happen()
        finally:
            operators.end()


class AlertedFaults:
    """The faults in order, each with its alerts."""

    def __init__(self, cluster: Cluster, job: AlertedJob, operators: WatchedOperators, alerts: FiringAlerts) -> None:
        self._cluster, self._job, self._operators, self._alerts = cluster, job, operators, alerts
        self._start = time.monotonic()

    def happen(self) -> None:
        """Cause all faults, one after the other; independent ones run in parallel."""
        first, standby = self._operators.add(), self._operators.add()
        self._waiting()
        self._workers()
        alone = self._leaders(first, standby)
        self._frozen()
        self._failed()
        self._operators.kill(alone)
        self._alerts.until_firing("RLHFOperatorAbsent")
        self._operators.add()
        self._alerts.until_over("RLHFOperatorAbsent")
        self._say("no operator was there")
        assert self._alerts.fired == documented(Path(__file__).name)

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._start:5.0f} s] {text}", file=sys.stderr, flush=True)

    def _until_training(self) -> None:
        """Wait until the operator reports training, Prometheus has scraped that, and iterations end."""
        self._alerts.until_scraped(f'rlhf_job_phase{{rlhf_job="{NAME}", phase="Running"}} == 1')
        trained = self._job.trained()
        wait_until("the job to train", lambda: self._job.trained() >= trained + 2, PATIENCE, every=0.5)

    def _waiting(self) -> None:
        """Start three jobs that cannot start, beside one that does; no Kueue runs to admit one of them.

        They stay until the end, and the operator's queue has them all in turn.
        """
        self._job.apply()
        self._job.allow(OPEN)
        nowhere = self._job.beside("nowhere", nodeSelector={"no": "node"})
        queued = self._job.beside("queued")
        queued["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
        self._cluster.apply([nowhere, queued, self._job.beside("lacking", image="localhost/lacking:1")])
        for name, other in WAITING.items():
            self._alerts.until_firing(name, namespace=NAMESPACE, rlhf_job=other)
        self._say("three jobs wait")
        self._until_training()
        self._say("the job trains")

    def _workers(self) -> None:
        """Kill one worker, then cut all off before it is back."""
        killed = ("RLHFWorkerLost", "RLHFJobRecoveringRepeatedly")
        self._alerts.until_quiet(*killed, "RLHFCoordinatorWithoutSessions", **OF_JOB)
        for counter in ('rlhf_job_restarts_total{reason="failure", ', "rlhf_recoveries_total{"):
            self._alerts.until_scraped(f'{counter}rlhf_job="{NAME}"}}')
        coordinator, worker = (self._job.until_running(name) for name in ("coordinator", "generation-0"))
        self._job.signal(worker, "SIGKILL")
        self._alerts.until_firing(*killed, **OF_JOB)
        self._say("a worker was killed")
        self._job.cut(coordinator, COORDINATOR_PORT, begin=True)
        self._alerts.until_firing("RLHFCoordinatorWithoutSessions", **OF_JOB)
        self._job.cut(coordinator, COORDINATOR_PORT, begin=False)
        self._say("the coordinator was cut off")
        self._alerts.until_over(*killed, "RLHFCoordinatorWithoutSessions", **OF_JOB)
        self._say("the workers are back")

    def _leaders(self, first: OperatorProcess, standby: OperatorProcess) -> OperatorProcess:
        """Kill the leader; later another operator ignores the present leader."""
        wait_until("one of both to lead", lambda: first.leads() != standby.leads(), PATIENCE, every=0.5)
        leader, other = (first, standby) if first.leads() else (standby, first)
        wait_until("the standby to be up", other.healthy, PATIENCE, every=0.5)
        self._operators.kill(leader)
        self._alerts.until_firing("RLHFOperatorNotLeading")
        self._alerts.until_over("RLHFOperatorNotLeading")
        alone = self._operators.add("--no-leader-election")
        self._alerts.until_firing("RLHFOperatorTwoLeaders")
        self._operators.kill(other)
        self._alerts.until_over("RLHFOperatorTwoLeaders")
        self._say("operators came and went")
        return alone

    def _frozen(self) -> None:
        """Freeze the API server for an operator without a Lease to lose; the job trains on, with faults independent of
        it.
        """
        soon = ("RLHFOperatorErrors", "RLHFOperatorQueueOld")
        names = (*soon, "RLHFOperatorWatchStale")
        self._until_training()
        coordinator = self._job.until_running("coordinator")
        self._bear_with_slow_iterations()
        self._job.kubectl("annotate", "pods,services,configmaps,networkpolicies", "--all", "--overwrite", "heard=now")
        self._alerts.until_quiet(*names)
        server = self._cluster.component("kube-apiserver")
        self._say("the API server stands still")
        server.signal("kube-apiserver", signal.SIGSTOP)
        try:
            # The longer this lasts, the rarer its jobs are retried, until none of them waits for another.
            self._alerts.until_firing(*soon)
            self._hung()
            self._rewards()
            self._stopped(coordinator)
            self._storage()
            self._alerts.until_firing("RLHFOperatorWatchStale")
        finally:
            server.signal("kube-apiserver", signal.SIGCONT)
        self._say("the API server goes on")

    def _bear_with_slow_iterations(self) -> None:
        """Adapt the alert to slow iterations: a job makes no progress if none ends in the time of several."""
        lasted = f'rlhf_iteration_last_seconds{{rlhf_job="{NAME}"}}'
        last = min(series.value for series in self._alerts.monitoring.prometheus.until(lasted, PATIENCE))
        seconds = min(max(NO_PROGRESS_SECONDS, math.ceil(ITERATIONS_OF_PROGRESS * last)), MOST_SECONDS)
        self._say(f"an iteration takes {last:.1f} s, and a job without one in {seconds} s makes no progress")
        self._alerts.change("RLHFJobNoProgress", windowSeconds=seconds)

    def _hung(self) -> None:
        """Let the reward hang."""
        names = ("RLHFJobStuck", "RLHFJobNoProgress", "RLHFGPUIdle")
        self._alerts.until_quiet(*names, **OF_JOB)
        self._job.hold()
        self._alerts.until_firing(*names, **OF_JOB)
        self._job.allow(OPEN)
        self._alerts.until_over(*names, **OF_JOB)
        self._say("it hung")

    def _rewards(self) -> None:
        for mode, name in (
            ("none", "RLHFRewardMissing"),
            ("nan", "RLHFRewardFailing"),
            ("low", "RLHFRewardCollapsed"),
            ("huge", "RLHFNonfiniteSteps"),
        ):
            self._alerts.until_quiet(name, **OF_JOB)
            self._job.reward(mode)
            self._alerts.until_firing(name, **OF_JOB)
            self._job.reward("right")
            self._alerts.until_over(name, **OF_JOB)
            self._say(f"reward: {mode}")

    def _stopped(self, coordinator: str) -> None:
        self._alerts.until_quiet("RLHFJobNotScraped", **OF_JOB)
        self._job.signal(coordinator, "SIGSTOP")
        self._alerts.until_firing("RLHFJobNotScraped", **OF_JOB)
        self._job.signal(coordinator, "SIGCONT")
        self._alerts.until_over("RLHFJobNotScraped", **OF_JOB)
        self._say("its coordinator stood still")

    def _storage(self) -> None:
        """Make the folder of the checkpoints read-only, which ends the job."""
        self._alerts.until_firing("RLHFKLRunaway", **OF_JOB)
        self._alerts.until_quiet("RLHFCheckpointFailing", "RLHFCheckpointOverdue", **OF_JOB)
        (self._job.folder / "checkpoints").chmod(0o555)
        self._alerts.until_firing("RLHFCheckpointOverdue", "RLHFCheckpointFailing", **OF_JOB)
        self._say("no checkpoint can be made")

    def _failed(self) -> None:
        """Wait until the operator reports the job's end; the coordinator remains for five more minutes."""
        self._alerts.until_firing("RLHFJobFailed", **OF_JOB)
        self._say("the job has failed")
        self._alerts.until_over("RLHFCheckpointOverdue", "RLHFCheckpointFailing", "RLHFKLRunaway", **OF_JOB)
        self._say("a job that has failed has no other alert")
        self._job.kubectl("delete", "rlhfjobs", "--all", "--wait=false")
        self._alerts.until_over("RLHFJobFailed", **OF_JOB)
        for name, other in WAITING.items():
            self._alerts.until_over(name, namespace=NAMESPACE, rlhf_job=other)
        self._say("no job is left")
        self._alerts.until_over("RLHFOperatorErrors", "RLHFOperatorQueueOld", "RLHFOperatorWatchStale")
        self._say("the operator has caught up")
