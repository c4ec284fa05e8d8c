"""A fully observed cluster: the release with dashboards and alerts, Prometheus, Alertmanager, jobs that train.

Owns the set-up of these parts and asserts nothing about them. Rule: dashboards and rules come from the objects that the
chart created in the cluster, as for Grafana's sidecar and the Prometheus operator, never from files of the checkout.
`make observe` and the tests use the same set-up.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml
from tests.cluster import environment, images, toolchain
from tests.cluster.cluster import Cluster
from tests.cluster.jobs_in_pods.gated_job import NAME, GatedJob
from tests.cluster.monitored.monitoring import SCRAPE, Monitoring
from tests.cluster.monitored.page import DashboardServer
from tests.cluster.processes import wait_until
from tests.cluster.releases.chart import CHART, HOME, RELEASE

NAMESPACE = "team-rl"
PATIENCE = 600.0
"""Seconds for any step, such as one iteration."""
PAGE_PORT = 7  # port of the slot, by index
FOUND_BY = "grafana_dashboard=1"
"""Label that Grafana's sidecar looks for."""
SHAPE: dict[str, Any] = {"iterations": 100_000, "batch": 32, "responses": 120, "every": 4}
MEASURED = {"interStage": {"mode": "Auto"}}
"""Fusion settings in which costs are measured and times predicted; whether samples move depends on the machine."""
EVALUATED = {"every": 2, "promptCount": 4}
CORRECTED = {"oldLogProbabilities": "Trainer", "mismatchCorrection": {"mode": "Truncate"}}
FUSED = {"interStage": {"mode": "Fixed", "threshold": 6, "pool": 1, "transfer": "KV"}}
"""Fusion settings with a fixed threshold, independent of measured costs."""


class Observed:
    """The whole set-up, inside a `with` block."""

    def __init__(self, folder: Path, *, interval: str = "2s") -> None:
        """`folder`: the job's files, dashboards and rules. `interval`: time between two scrapes."""
        self.folder, self.interval = folder, interval
        self._steps = ExitStack()

    def __enter__(self) -> Self:
        try:
            return self._start()
        except BaseException:
            self._steps.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._steps.__exit__(kind, value, trace)

    def _start(self) -> Self:
        archives = [images.mounted(Path(environment.PYTHON).parent), images.operator(), images.coordinator()]
        self.cluster = self._steps.enter_context(Cluster(level="node", gpus=0, images=archives))
        for path in toolchain.monitor_definitions():
            self.cluster.kubectl("apply", "--server-side", f"--filename={path}")
            self.cluster.wait_defined(path.stem.partition("_")[2] + ".monitoring.coreos.com")
        self._install()
        self.dashboards = self._dashboards()
        self.monitoring = Monitoring(self.cluster, scrape=SCRAPE, rules=[self._rules()], interval=self.interval)
        self._steps.enter_context(self.monitoring)
        port = self.cluster.port(PAGE_PORT)
        server = DashboardServer(self.folder / "dashboards", self.monitoring.prometheus.url, port=port)
        self.server = self._steps.enter_context(server)
        self.job = self._train()
        return self

    def _install(self) -> None:
        """Install the release in its namespace, with monitors, dashboards and alerts."""
        self.cluster.add_namespace(HOME, {"pod-security.kubernetes.io/enforce": "restricted"})
        values: dict[str, Any] = {
            "image": {"registry": "localhost"},
            "metrics": {"serviceMonitor": {"enabled": True}, "podMonitor": {"enabled": True}},
            "dashboards": {"enabled": True},
            "alerts": {"enabled": True},
        }
        named = {"operator": images.OPERATOR, "coordinator": images.COORDINATOR, "worker": images.MOUNTED}
        for name, image in named.items():
            repository, _, tag = image.removeprefix("localhost/").partition(":")
            values["image"][name] = {"repository": repository, "tag": tag}
        values_file = self.folder / "values.json"
        values_file.write_text(json.dumps(values))
        self.cluster.helm("install", RELEASE, str(CHART), f"--namespace={HOME}", f"--values={values_file}")
        self.cluster.wait_defined("rlhfjobs.rlhf.dev")

    def _dashboards(self) -> list[str]:
        """Write the dashboards that Grafana's sidecar finds in the cluster to files; return their names."""
        folder = self.folder / "dashboards"
        folder.mkdir()
        found = self.cluster.get("configmaps", f"--namespace={HOME}", f"--selector={FOUND_BY}")["items"]
        for item in found:
            for name, text in item["data"].items():
                (folder / name).write_text(text)
        return sorted(path.stem for path in folder.iterdir())

    def _rules(self) -> Path:
        """Return a rule file with the content of the chart's PrometheusRule."""
        found = self.cluster.get("prometheusrules.monitoring.coreos.com", f"--namespace={HOME}")["items"]
        path = self.folder / "rules.yaml"
        path.write_text(yaml.safe_dump({"groups": [group for item in found for group in item["spec"]["groups"]]}))
        return path

    def _train(self) -> GatedJob:
        """Start a job that trains with fusion and checkpoints until it is deleted, and one that waits for GPUs."""
        job = GatedJob(self.cluster, NAMESPACE, self.folder / "job", forgiven=1000, **SHAPE)
        job.manifest["spec"] |= {"fusion": MEASURED, "evaluation": EVALUATED}
        for algorithm in job.manifest["spec"]["algorithm"].values():
            algorithm |= CORRECTED
        job.allow(SHAPE["iterations"])
        job.apply()
        waiting = json.loads(json.dumps(job.manifest))
        waiting["metadata"]["name"] = "waiting"
        own = job.folder / "waiting"
        own.mkdir()
        own.chmod(0o777)
        waiting["spec"]["checkpoints"]["path"] = str(own)
        small = {"name": "worker", "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}}}
        waiting["spec"]["coordinator"] = {"template": {"spec": {"containers": [small]}}}
        for group in ("generation", "inference", "training"):
            waiting["spec"][group]["gpusPerReplica"] = 1  # the node has none of these
        self.cluster.apply(waiting)
        return job

    def until_trained(self, iterations: int) -> None:
        """Wait until the job has trained this number of iterations; each may take PATIENCE."""
        while (trained := self.job.trained()) < iterations:
            self._until_trained_more(trained)

    def _until_trained_more(self, before: int) -> None:
        def more() -> bool:
            failed = self.job.condition("Failed")
            assert failed.get("status") != "True", failed["message"]
            return self.job.trained() > before

        wait_until(f"iteration {before + 1}", more, PATIENCE, every=1.0, check=self.cluster.check)

    def change(self) -> None:
        """Set FUSED, which restarts its coordinator, and give inference another worker."""
        self.job.patch(fusion=FUSED, inference={"replicas": 2})

    def lose(self, worker: str) -> None:
        """Kill a worker's pod, and wait until its successor runs."""
        pod = f"{NAME}-{worker}"
        before = ""

        def runs() -> bool:
            nonlocal before
            before = self.job.uid(f"pod/{pod}")
            return bool(before and self.job.container(worker))

        wait_until(f"{worker} to run", runs, PATIENCE, check=self.cluster.check)
        delete = ("delete", f"pod/{pod}", "--ignore-not-found", "--grace-period=0", "--force", self.job.where)
        wait_until(f"the deletion of {pod}", lambda: self.job.answer(*delete) is not None, PATIENCE)

        def successor() -> bool:
            # The id first: a container that is seen afterwards is of this pod, or of a later one.
            return self.job.uid(f"pod/{pod}") not in ("", before) and bool(self.job.container(worker))

        wait_until(f"another pod of {worker} to run", successor, PATIENCE, check=self.cluster.check)
