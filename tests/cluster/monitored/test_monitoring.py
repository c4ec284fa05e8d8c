"""Prometheus and Alertmanager beside a cluster: they discover pods through the API server with few rights.

Alerts arrive, and an API server with the definitions of the Prometheus operator accepts the chart's objects for it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from tests.cluster import toolchain
from tests.cluster.cluster import Cluster, ClusterError
from tests.cluster.monitored.monitoring import ACCOUNT, HOME, SCRAPE, Monitoring
from tests.cluster.operator_process import OperatorProcess
from tests.cluster.processes import wait_until
from tests.cluster.releases import chart
from tests.support.observability.prometheus_api import PrometheusError

pytestmark = pytest.mark.full

PATIENCE = 240.0  # seconds for any one fact
OBJECTS = {
    "alerts": {"enabled": True, "labels": {"release": "prometheus"}, "alertLabels": {"team": "rl"}},
    "metrics": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    },
}
"""Values with which the chart creates every kind of object that the Prometheus operator reads."""


def test_targets_are_found_and_an_alert_arrives_and_ends(
    cluster: Cluster, operator: OperatorProcess, tmp_path: Path
) -> None:
    rules = tmp_path / "rules.yaml"
    rule = {"alert": "OperatorLeads", "expr": "rlhf_operator_leader == 1", "labels": {"severity": "info"}}
    rules.write_text(yaml.safe_dump({"groups": [{"name": "test", "rules": [rule]}]}))
    beside = {"job_name": "operator", "static_configs": [{"targets": [operator.metrics_address]}]}
    with Monitoring(cluster, scrape=(*SCRAPE, beside), rules=[rules], interval="2s") as monitoring:
        prometheus, alertmanager = monitoring.prometheus, monitoring.alertmanager
        prometheus.until("up{job='operator'} == 1", PATIENCE)
        wait_until("the alert to arrive", lambda: alertmanager.alerts("OperatorLeads"), PATIENCE)
        wait_until("it to fire", lambda: {item["state"] for item in prometheus.alerts()} == {"firing"}, PATIENCE)
        rules.write_text(yaml.safe_dump({"groups": []}))
        prometheus.reload()
        wait_until("the alert to end", lambda: not prometheus.alerts(), PATIENCE)
        with pytest.raises(PrometheusError, match="parse error"):
            prometheus.query("up{")
    rights = cluster.user(f"system:serviceaccount:{HOME}:{ACCOUNT}")
    assert cluster.kubectl("get", "pods", "--all-namespaces", "--output=name", kubeconfig=rights) is not None
    with pytest.raises(ClusterError, match="forbidden"):
        cluster.kubectl("get", "secrets", "--all-namespaces", kubeconfig=rights)


def test_an_api_server_takes_what_the_chart_makes_for_the_prometheus_operator(cluster: Cluster) -> None:
    for path in toolchain.monitor_definitions():
        cluster.kubectl("apply", "--server-side", f"--filename={path}")
        cluster.wait_defined(path.stem.partition("_")[2] + ".monitoring.coreos.com")
    cluster.add_namespace(chart.HOME)
    rendered = [
        item for item in chart.render(OBJECTS).values() if item["apiVersion"].startswith("monitoring.coreos.com/")
    ]
    assert {item["kind"] for item in rendered} == {"ServiceMonitor", "PodMonitor", "PrometheusRule"}
    for item in rendered:
        strict = ("apply", "--server-side", "--dry-run=server", "--validate=strict", "--filename=-")
        cluster.kubectl(*strict, stdin=json.dumps(item))
