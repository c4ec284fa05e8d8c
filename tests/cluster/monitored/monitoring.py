"""A Prometheus and an Alertmanager beside a test cluster, which discover targets through its API server.

Owns their command lines, their configuration and their account. Rule: targets and labels follow the configuration that
is documented for users. Only the access to the API server is added here, because Prometheus is a process of this
machine rather than a pod. Its account may read pods and nothing else. Both processes belong to the cluster: they end
with it, and their data is in its folder.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml
from tests.cluster.cluster import Cluster
from tests.cluster.processes import wait_until
from tests.cluster.toolchain import binary
from tests.support.observability.prometheus_api import AlertmanagerApi, PrometheusApi

START_TIMEOUT = 240.0  # seconds until one answers
PROMETHEUS_PORT, ALERTMANAGER_PORT = 5, 6  # ports of the slot, by index
HOME = "monitoring"
ACCOUNT = "prometheus"
INTERVAL = "2s"
"""Time between two scrapes; short, because a test waits for several."""
DOCUMENTED = Path(__file__).parents[3] / "examples" / "prometheus" / "scrape.yaml"
SCRAPE: tuple[dict[str, Any], ...] = tuple(yaml.safe_load(DOCUMENTED.read_text())["scrape_configs"])
"""The scrape configuration that is documented for users."""


class Monitoring:
    """Prometheus and Alertmanager of a cluster, between `start` and `stop`; at most one pair per cluster."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        scrape: Sequence[Mapping[str, Any]] = SCRAPE,
        rules: Iterable[Path] = (),
        interval: str = INTERVAL,
    ) -> None:
        """`scrape`: scrape_configs as for a Prometheus in the cluster. `rules`: rule files.

        `interval`: time between two scrapes, and between two evaluations of a group without its own interval.
        """
        self._cluster = cluster
        self._scrape = [dict(item) for item in scrape]
        self._rules = [str(path) for path in rules]
        self._interval = interval
        self._processes = cluster.component("prometheus")
        self.prometheus = PrometheusApi(f"http://127.0.0.1:{cluster.port(PROMETHEUS_PORT)}")
        self.alertmanager = AlertmanagerApi(f"http://127.0.0.1:{cluster.port(ALERTMANAGER_PORT)}")

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Self:
        """Start both and wait until they answer; raises TimeoutError, or ClusterError with the end of a log."""
        folder = self._cluster.folder / "monitoring"
        folder.mkdir(exist_ok=True)
        self._start_alertmanager(folder)
        self._start_prometheus(folder)
        for name, api in (("Alertmanager", self.alertmanager), ("Prometheus", self.prometheus)):
            wait_until(f"{name} to be ready", api.ready, START_TIMEOUT, check=self._cluster.check)
        return self

    def stop(self) -> None:
        """Stop both; the data stays as long as the cluster."""
        for name in ("prometheus", "alertmanager"):
            self._processes.stop(name)

    def _start_prometheus(self, folder: Path) -> None:
        configuration = {
            "global": {"scrape_interval": self._interval, "evaluation_interval": self._interval},
            "scrape_configs": [self._reaching(item, folder) for item in self._scrape],
            "rule_files": self._rules,
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [_address(self.alertmanager.url)]}]}]},
        }
        path = folder / "prometheus.yaml"
        path.write_text(yaml.safe_dump(configuration))
        argv = [
            f"--config.file={path}",
            f"--storage.tsdb.path={folder / 'prometheus'}",
            f"--web.listen-address={_address(self.prometheus.url)}",
            "--web.enable-lifecycle",
            "--enable-feature=exemplar-storage",
        ]
        self._processes.start("prometheus", [binary("prometheus"), *argv])

    def _start_alertmanager(self, folder: Path) -> None:
        path = folder / "alertmanager.yaml"
        route = {"receiver": "nobody", "group_by": ["..."], "group_wait": "0s"}
        path.write_text(yaml.safe_dump({"route": route, "receivers": [{"name": "nobody"}]}))
        argv = [
            f"--config.file={path}",
            f"--storage.path={folder / 'alertmanager'}",
            f"--web.listen-address={_address(self.alertmanager.url)}",
            "--cluster.listen-address=",  # there is only one
        ]
        self._processes.start("alertmanager", [binary("alertmanager"), *argv])

    def _reaching(self, scrape: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """Return a scrape_config with the access to the API server, if it uses that."""
        result = copy.deepcopy(dict(scrape))
        asks = result.get("kubernetes_sd_configs", [])
        if asks:
            token = self._token(folder)
        for each in asks:
            authority = str(self._cluster.folder / "pki" / "ca.crt")
            each |= {"api_server": self._cluster.server, "tls_config": {"ca_file": authority}}
            each["authorization"] = {"credentials_file": str(token)}
        return result

    def _token(self, folder: Path) -> Path:
        """Return a file with a token of the account that may read pods."""
        path = folder / "token"
        if not path.exists():
            self._cluster.add_namespace(HOME)
            self._cluster.apply(_account())
            path.touch(mode=0o600)
            path.write_text(self._cluster.kubectl("create", "token", ACCOUNT, f"--namespace={HOME}", "--duration=24h"))
        return path


def _account() -> list[dict[str, Any]]:
    authorization = "rbac.authorization.k8s.io"
    subject = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": HOME}
    role = {"apiGroup": authorization, "kind": "ClusterRole", "name": ACCOUNT}
    kinds: tuple[tuple[str, str, dict[str, Any], dict[str, Any]], ...] = (
        ("v1", "ServiceAccount", {"namespace": HOME}, {}),
        (f"{authorization}/v1", "ClusterRole", {}, {"rules": [_READS_PODS]}),
        (f"{authorization}/v1", "ClusterRoleBinding", {}, {"subjects": [subject], "roleRef": role}),
    )
    return [
        {"apiVersion": version, "kind": kind, "metadata": {"name": ACCOUNT, **place}, **more}
        for version, kind, place, more in kinds
    ]


_READS_PODS = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}


def _address(url: str) -> str:
    return url.removeprefix("http://")
