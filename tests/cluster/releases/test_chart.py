"""The Helm chart without a cluster: the values it accepts, the objects that its toggles add, and the rights it
grants."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from tests.cluster.releases.chart import (
    CHART,
    DEFINITION,
    EVERYTHING,
    FLAVORS,
    HOME,
    LEASE,
    RELEASE,
    ROOT,
    SCHEDULING,
    USED,
    Objects,
    flat,
    notes,
    pod,
    render,
    triples,
)

from rlhf_common import names
from rlhf_operator.__main__ import RESOURCES
from rlhf_operator.gang.apis import APIS, KUEUE, MODES, ServedApis
from rlhf_operator.watch_events import WATCHED


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"replicas": 2}, "replicas"),
        ({"controller": {"replica": 2}}, "replica"),
        ({"controller": {"replicas": "2"}}, "replicas"),
        ({"controller": {"concurrency": 0}}, "concurrency"),
        ({"controller": {"logFormat": "xml"}}, "logFormat"),
        ({"controller": {"replicas": 2, "leaderElection": {"enabled": False}}}, "replicas"),
        ({"controller": {"env": [{"value": "x"}]}}, "env"),
        ({"controller": {"resources": {"limit": {}}}}, "limit"),
        ({"image": {"operator": {"digest": "sha256:12"}}}, "digest"),
        ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"watchNamespaces": ["Team_A"]}, "watchNamespaces"),
        ({"watchNamespaces": "team-a"}, "watchNamespaces"),
        ({"crds": {"enabled": "yes"}}, "crds"),
        ({"podSecurity": {"runAsUser": 0}}, "runAsUser"),
        ({"podSecurity": {"runAsUser": "none"}}, "runAsUser"),
        ({"controller": {"podLabels": {"bad name": "x"}}}, "/controller/podLabels': additional properties 'bad name'"),
        ({"controller": {"podLabels": {"a/b/c": "x"}}}, "/controller/podLabels': additional properties 'a/b/c'"),
        ({"controller": {"podLabels": {"-x": "x"}}}, "podLabels"),
        ({"controller": {"podLabels": {"x" * 64: "x"}}}, "podLabels"),
        ({"controller": {"podLabels": {"cost": "a b"}}}, "/controller/podLabels/cost"),
        ({"controller": {"podLabels": {"cost": "x" * 64}}}, "/controller/podLabels/cost"),
        ({"controller": {"podLabels": {"cost": 7}}}, "/controller/podLabels/cost"),
        ({"commonLabels": {"team": "r l"}}, "/commonLabels/team"),
        ({"controller": {"podAnnotations": {"bad name": "x"}}}, "podAnnotations"),
        ({"controller": {"nodeSelector": {"kubernetes.io/os": "a b"}}}, "nodeSelector"),
        ({"metrics": {"serviceMonitor": {"labels": {"release": "a b"}}}}, "/metrics/serviceMonitor/labels/release"),
        ({"operatorClass": "Blue"}, "operatorClass"),
        ({"serviceAccount": {"create": False}}, "name"),
        ({"scheduling": {"kueue": "yes"}}, "kueue"),
        ({"scheduling": {"yunikorn": True}}, "yunikorn"),
        ({"scheduling": {"ignoreQueueLabels": "yes"}}, "ignoreQueueLabels"),
        ({"metrics": {"port": 8081}}, "port"),
        ({"metrics": {"enabled": False, "serviceMonitor": {"enabled": True}}}, "metrics"),
        ({"metrics": {"serviceMonitor": {"interval": "30"}}}, "interval"),
        ({"metrics": {"enabled": False, "podMonitor": {"enabled": True}}}, "metrics"),
        ({"metrics": {"podMonitor": {"interval": "30"}}}, "interval"),
        ({"dashboards": {"namespace": "Team_A"}}, "namespace"),
        ({"dashboards": {"labels": {"grafana_dashboard": 1}}}, "/dashboards/labels/grafana_dashboard"),
        ({"alerts": {"rules": {"RLHFJobStuk": {}}}}, "RLHFJobStuk"),
        ({"alerts": {"rules": {"RLHFJobStuck": {"trainingSeconds": "1h"}}}}, "trainingSeconds"),
        ({"alerts": {"rules": {"RLHFJobStuck": {"share": 1}}}}, "share"),
        ({"alerts": {"rules": {"RLHFGPUIdle": {"share": 2}}}}, "share"),
        ({"alerts": {"rules": {"RLHFGPUIdle": {"windowSeconds": 0}}}}, "windowSeconds"),
        ({"alerts": {"rules": {"RLHFGPUIdle": {"for": "5"}}}}, "for"),
        ({"alerts": {"rules": {"RLHFGPUIdle": {"severity": "bad"}}}}, "severity"),
        ({"alerts": {"alertLabels": {"severity": "page"}}}, "severity"),
        ({"alerts": {"runbookUrl": "docs/"}}, "runbookUrl"),
        ({"podDisruptionBudget": {"minAvailable": "half"}}, "minAvailable"),
        ({"networkPolicy": {"apiServerPorts": []}}, "apiServerPorts"),
        ({"tracing": {"endpoint": "otel-collector:4317"}}, "endpoint"),
        ({"tracing": {"share": 2}}, "share"),
    ],
    ids=json.dumps,
)
def test_a_wrong_value_is_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match="schema") as refused:
        render(values)
    assert named in str(refused.value)


def test_the_schema_knows_every_value_and_takes_no_other() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def compare(node: dict[str, Any], values: dict[str, Any], path: str) -> None:
        documented = set(node["properties"]) - {"global"}
        assert node["additionalProperties"] is False, path
        optional = {"claims"} if path.endswith(".resources") else set()
        assert documented - optional == set(values), path
        for key, value in values.items():
            child = node["properties"][key]
            child = schema["definitions"][child["$ref"].rpartition("/")[2]] if "$ref" in child else child
            if isinstance(value, dict) and "properties" in child:
                compare(child, value, f"{path}.{key}")

    compare(schema, values, "")


def test_the_definition_is_that_of_the_contract_and_is_kept() -> None:
    stale = f"cp {DEFINITION.relative_to(ROOT)} {CHART.relative_to(ROOT)}/definition/"
    assert (CHART / "definition" / "rlhfjobs.yaml").read_text() == DEFINITION.read_text(), f"stale; {stale}"
    definition = render()["CustomResourceDefinition", "rlhfjobs.rlhf.dev"]
    metadata = definition["metadata"]
    assert metadata.pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert metadata.pop("labels")
    assert definition == yaml.safe_load(DEFINITION.read_text())
    assert ("CustomResourceDefinition", "rlhfjobs.rlhf.dev") not in render({"crds": {"enabled": False}})


def test_the_table_of_rights_is_what_the_code_can_ask_for() -> None:
    tables = [USED, LEASE, FLAVORS, *SCHEDULING.values()]
    assert {place for table in tables for place in table if "/" not in place[1]} == {
        (resource.group, resource.plural) for resource in RESOURCES.values()
    }
    watching = {(group, plural) for (group, plural), verbs in USED.items() if "watch" in verbs}
    assert watching == {(group, plural) for group, _, plural in WATCHED.values()}
    assert all({"get", "list"} <= set(USED[item].split()) for item in watching)


@pytest.mark.parametrize("mode", MODES)
def test_a_backend_brings_its_rights_and_its_flag_and_nothing_else(mode: str) -> None:
    name = mode.lower()
    rendered = render({"scheduling": {name: True}})
    used = USED | SCHEDULING[name]
    assert flat(rendered["ClusterRole", RELEASE]["rules"]) == triples(used)
    assert f"--scheduling={mode}" in pod(rendered)["containers"][0]["args"]
    watched = {(group, plural) for versions in APIS[mode] for group, plural in _places(versions[0])}
    assert {each for each, verbs in SCHEDULING[name].items() if "watch" in verbs.split()} == watched
    flavors = ("ClusterRole", f"{RELEASE}-flavors")
    assert (flavors in rendered) == (mode == KUEUE)
    if mode == KUEUE:
        assert flat(rendered[flavors]["rules"]) == triples(FLAVORS)


@pytest.mark.parametrize("version", [version for version, _ in APIS[KUEUE]])
def test_kueue_is_used_where_the_cluster_serves_it_unless_a_value_says_otherwise(version: str) -> None:
    found = render(None, version)
    assert "--scheduling=Kueue" in pod(found)["containers"][0]["args"]
    assert flat(found["ClusterRole", RELEASE]["rules"]) == triples(USED | SCHEDULING["kueue"])
    assert ("ClusterRole", f"{RELEASE}-flavors") in found
    for rendered in (
        render(),
        render({"scheduling": {"kueue": False}}, version),
        render({"scheduling": None}, version),
    ):
        assert "--scheduling=" in pod(rendered)["containers"][0]["args"]
        assert flat(rendered["ClusterRole", RELEASE]["rules"]) == triples(USED)


def test_queue_labels_are_ignored_only_where_a_value_says_so() -> None:
    assert "--ignore-queue-labels" not in pod(render())["containers"][0]["args"]
    ignoring = render({"scheduling": {"ignoreQueueLabels": True}})
    assert "--ignore-queue-labels" in pod(ignoring)["containers"][0]["args"]


def test_values_of_a_chart_before_gangs_still_render() -> None:
    rendered = render({"scheduling": None})
    assert "--scheduling=" in pod(rendered)["containers"][0]["args"]
    assert flat(rendered["ClusterRole", RELEASE]["rules"]) == triples(USED)


def _places(version: str) -> set[tuple[str, str]]:
    return {(group, plural) for group, _, plural in ServedApis(frozenset([version])).watched().values()}


def test_every_grant_is_used_and_every_use_is_granted() -> None:
    rendered = render()
    assert flat(rendered["ClusterRole", RELEASE]["rules"]) == triples(USED)
    lease = rendered["Role", f"{RELEASE}-leader"]["rules"]
    assert flat(lease) == triples(LEASE)
    assert all(rule.get("resourceNames") == ["rlhf-operator"] for rule in lease if rule["verbs"] != ["create"])
    bound = {key: each for key, each in rendered.items() if key[0] in ("ClusterRoleBinding", "RoleBinding")}
    account = [{"kind": "ServiceAccount", "name": RELEASE, "namespace": HOME}]
    assert len(bound) == 2
    assert all(item["subjects"] == account for item in bound.values())


def test_a_class_of_jobs_goes_to_the_operator_and_to_the_name_of_its_lease() -> None:
    rendered = render({"operatorClass": "blue"})
    assert "--operator-class=blue" in pod(rendered)["containers"][0]["args"]
    [lease] = [rule for rule in rendered["Role", f"{RELEASE}-leader"]["rules"] if rule["verbs"] != ["create"]]
    assert lease["resourceNames"] == ["rlhf-operator-blue"]
    assert not any("--operator-class" in argument for argument in pod(render())["containers"][0]["args"])


def test_watched_namespaces_get_a_role_each_and_the_cluster_none() -> None:
    rendered = render({"watchNamespaces": ["team-a"], "rbac": {"userRoles": False}})
    assert rendered["Role", RELEASE]["metadata"]["namespace"] == "team-a"
    assert flat(rendered["Role", RELEASE]["rules"]) == triples(USED)
    assert not [key for key in rendered if key[0].startswith("ClusterRole")]
    assert "--namespace=team-a" in pod(rendered)["containers"][0]["args"]


def test_rights_can_be_left_to_the_cluster_administrator() -> None:
    rendered = render(
        {"rbac": {"create": False, "userRoles": False}, "serviceAccount": {"create": False, "name": "ours"}}
    )
    assert not [kind for kind, _ in rendered if "Role" in kind or kind == "ServiceAccount"]
    assert pod(rendered)["serviceAccountName"] == "ours"


def test_users_roles_add_jobs_and_no_status_writes() -> None:
    rendered = render()
    view, edit = rendered["ClusterRole", f"{RELEASE}-view"], rendered["ClusterRole", f"{RELEASE}-edit"]
    to = "rbac.authorization.k8s.io/aggregate-to-"
    assert {label for label in view["metadata"]["labels"] if label.startswith(to)} == {
        to + item for item in ("view", "edit", "admin")
    }
    assert {label for label in edit["metadata"]["labels"] if label.startswith(to)} == {to + "edit", to + "admin"}
    assert {verb for *_, verb in flat(view["rules"])} == {"get", "list", "watch"}
    assert {each for _, each, _ in flat(edit["rules"])} == {"rlhfjobs", "rlhfjobs/scale"}


def test_replicas_bring_a_budget_and_a_spread() -> None:
    single, two = render(), render({"controller": {"replicas": 2}})
    assert ("PodDisruptionBudget", RELEASE) not in single
    assert "topologySpreadConstraints" not in pod(single)
    assert two["PodDisruptionBudget", RELEASE]["spec"]["minAvailable"] == 1
    assert two["PodDisruptionBudget", RELEASE]["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    selector = two["Deployment", RELEASE]["spec"]["selector"]
    assert two["PodDisruptionBudget", RELEASE]["spec"]["selector"] == selector
    assert pod(two)["topologySpreadConstraints"][0]["labelSelector"] == selector
    off = render({"controller": {"replicas": 2}, "podDisruptionBudget": {"enabled": False}})
    assert ("PodDisruptionBudget", RELEASE) not in off
    own = [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]
    assert pod(render({"controller": {"topologySpreadConstraints": own}}))["topologySpreadConstraints"] == own


def test_without_election_there_is_no_lease_and_never_a_second_pod() -> None:
    rendered = render({"controller": {"leaderElection": {"enabled": False}}})
    assert "--no-leader-election" in pod(rendered)["containers"][0]["args"]
    assert rendered["Deployment", RELEASE]["spec"]["strategy"] == {"type": "Recreate"}
    assert ("Role", f"{RELEASE}-leader") not in rendered


def test_images_by_tag_and_by_digest_reach_the_pod_and_the_flags() -> None:
    digest = "sha256:" + "a" * 64
    image = {"registry": "registry:5000", "operator": {"digest": digest, "tag": "x"}, "worker": {"tag": "v2"}}
    container = pod(render({"image": image}))["containers"][0]
    assert container["image"] == f"registry:5000/rlhf-operator/operator@{digest}"
    assert "--coordinator-image=registry:5000/rlhf-operator/coordinator:0.1.0" in container["args"]
    assert "--worker-image=registry:5000/rlhf-operator/worker:v2" in container["args"]
    assert "--vllm-worker-image=registry:5000/rlhf-operator/worker-vllm:0.1.0" in container["args"]


@pytest.mark.parametrize(
    "none", [{"repository": ""}, None]
)  # the second is what --reuse-values keeps of an earlier chart
def test_without_an_image_of_vllm_its_workers_get_that_of_all(none: dict[str, str] | None) -> None:
    arguments = pod(render({"image": {"vllmWorker": none}}))["containers"][0]["args"]
    assert not [argument for argument in arguments if "vllm" in argument]


@pytest.mark.parametrize(
    ("values", "user"),
    [
        ({}, 10001),
        ({"podSecurity": {"runAsUser": 1000680000}}, 1000680000),
        ({"podSecurity": {"runAsUser": None}}, None),
        ({"podSecurity": None}, 10001),  # helm upgrade --reuse-values from a chart without this value
    ],
)
def test_the_user_of_all_pods_is_named_or_left_to_the_cluster(values: dict[str, Any], user: int | None) -> None:
    spec = pod(render(values))
    said = {name: each for name, each in spec["securityContext"].items() if name.startswith("runAs")}
    assert said == {"runAsNonRoot": True} | ({} if user is None else {"runAsUser": user, "runAsGroup": user})
    assert f"--run-as-user={user or 'none'}" in spec["containers"][0]["args"]


@pytest.mark.parametrize("name", ["app.kubernetes.io/name", "helm.sh/chart", "pod-template-hash", "rlhf.dev/job-name"])
@pytest.mark.parametrize("field", ["commonLabels", "controller.podLabels"])
def test_labels_that_objects_are_found_by_are_refused(field: str, name: str) -> None:
    """Check that labels are refused: some select the Deployment's pods, and every job's NetworkPolicy uses others."""
    values: dict[str, Any] = {name: "x"}
    for item in reversed(field.split(".")):
        values = {item: values}
    with pytest.raises(ValueError, match=f"{field}: {name}: is set by the chart or the cluster"):
        render(values)


def test_labels_of_any_other_name_are_taken() -> None:
    pod_labels = {"app.kubernetes.io/part-of": "training", "team.example.com/cost_center": "", "x": "A-1_b.c"}
    rendered = render({"controller": {"podLabels": pod_labels}, "commonLabels": {"example.com/x": "y"}})
    labels = rendered["Deployment", RELEASE]["spec"]["template"]["metadata"]["labels"]
    assert labels.items() >= {**pod_labels, "example.com/x": "y"}.items()


def test_metrics_and_network_toggles() -> None:
    assert ("Service", f"{RELEASE}-metrics") not in render({"metrics": {"enabled": False}})
    plain = render({"metrics": {"port": 9090}})
    assert plain["Service", f"{RELEASE}-metrics"]["spec"]["ports"][0]["port"] == 9090
    assert "--metrics-address=[::]:9090" in pod(plain)["containers"][0]["args"]
    assert not {kind for kind, _ in plain} & {"ServiceMonitor", "PodMonitor", "NetworkPolicy"}
    rendered = render(EVERYTHING)
    assert rendered["ServiceMonitor", "everything"]["metadata"]["labels"]["release"] == "prometheus"
    policy = rendered["NetworkPolicy", "everything"]["spec"]
    assert policy["ingress"][0]["from"] == [{"namespaceSelector": {}}]
    assert names.COORDINATOR_PORT in [port["port"] for rule in policy["egress"] for port in rule["ports"]]


def test_both_ways_to_scrape_give_the_same_labels() -> None:
    rendered = render(EVERYTHING)
    monitor = rendered["PodMonitor", "everything-jobs"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["namespaceSelector"] == {"any": True}
    assert monitor["spec"]["selector"]["matchExpressions"] == [{"key": names.LABEL_JOB_NAME, "operator": "Exists"}]
    [jobs] = monitor["spec"]["podMetricsEndpoints"]
    [operator] = rendered["ServiceMonitor", "everything"]["spec"]["endpoints"]
    assert (jobs["port"], jobs["honorLabels"], operator["honorLabels"]) == ("metrics", False, True)
    documented = yaml.safe_load((ROOT / "examples/prometheus/scrape.yaml").read_text())["scrape_configs"]
    plain_jobs, plain_operator = documented
    assert (plain_jobs.get("honor_labels", False), plain_operator["honor_labels"]) == (False, True)
    sources = {rule["targetLabel"]: rule["sourceLabels"] for rule in jobs["relabelings"] if "targetLabel" in rule}
    plain = {
        rule["target_label"]: rule["source_labels"] for rule in plain_jobs["relabel_configs"] if "target_label" in rule
    }
    assert sources == plain
    assert set(sources) == {"namespace", "pod", "rlhf_job"}
    assert "metricRelabelings" not in jobs
    assert "metric_relabel_configs" not in plain_jobs
    watched = render({"metrics": {"podMonitor": {"enabled": True}}, "watchNamespaces": ["a", "b"]})
    assert watched["PodMonitor", f"{RELEASE}-jobs"]["spec"]["namespaceSelector"] == {"matchNames": ["a", "b"]}
    assert "PodMonitor" not in {kind for kind, _ in render({"metrics": {"podMonitor": None}})}, "--reuse-values"


def test_dashboards_are_config_maps_that_the_sidecar_of_grafana_finds() -> None:
    files = {path.name: json.loads(path.read_text()) for path in (CHART / "dashboards").glob("*.json")}
    assert files
    assert "ConfigMap" not in {kind for kind, _ in render()}
    assert "ConfigMap" not in {kind for kind, _ in render({"dashboards": None})}, "helm upgrade --reuse-values"
    settings = {
        "namespace": "monitoring",
        "labels": {"grafana_dashboard": "yes"},
        "annotations": {"k8s-sidecar": "/RL"},
    }
    for values, namespace, label, note in (
        ({}, HOME, "1", {"grafana_folder": "RLHF"}),
        (settings, "monitoring", "yes", {"k8s-sidecar": "/RL", "grafana_folder": "RLHF"}),
    ):
        objects = render({"dashboards": {"enabled": True, **values}})
        dashboards = [item for (kind, _), item in objects.items() if kind == "ConfigMap"]
        assert {item["metadata"]["namespace"] for item in dashboards} == {namespace}
        assert {item["metadata"]["labels"]["grafana_dashboard"] for item in dashboards} == {label}
        assert all(item["metadata"]["annotations"] == note for item in dashboards)
        assert {name: json.loads(text) for item in dashboards for name, text in item["data"].items()} == files
        assert all(len(item["data"]) == 1 for item in dashboards)


def test_what_is_asked_for_pods_reaches_them() -> None:
    rendered = render(EVERYTHING | {"controller": EVERYTHING["controller"] | {"podLabels": {"cost": "shared"}}})
    assert all(item["metadata"]["labels"]["team"] == "rl" for item in rendered.values())
    template, controller = rendered["Deployment", "everything"]["spec"]["template"], EVERYTHING["controller"]
    assert template["metadata"]["labels"]["cost"] == "shared"
    assert template["metadata"]["annotations"]["note"] == "kept"
    for entry in ("priorityClassName", "nodeSelector", "tolerations", "affinity"):
        assert template["spec"][entry] == controller[entry]
    assert controller["env"][0] in template["spec"]["containers"][0]["env"]


def egress(objects: Objects) -> list[dict[str, Any]]:
    rules: list[dict[str, Any]] = objects["NetworkPolicy", RELEASE]["spec"]["egress"]
    return rules


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [
        ("http://otel-collector.observability:4317", 4317),
        ("https://[fd00::7]:14317/", 14317),
        ("https://collector.example", 443),
        ("http://collector.example", 80),
    ],
)
def test_a_collector_of_traces_is_named_and_let_out(endpoint: str, port: int) -> None:
    values = {"tracing": {"endpoint": endpoint, "share": 0.25}, "networkPolicy": {"enabled": True}}
    rendered = render(values)
    container = pod(rendered)["containers"][0]
    assert {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": endpoint} in container["env"]
    assert "--trace-share=0.25" in container["args"]
    assert {"ports": [{"port": port, "protocol": "TCP"}]} in egress(rendered)


@pytest.mark.parametrize("tracing", [{}, None], ids=["none by default", "values of a chart before it"])
def test_without_a_collector_nothing_is_named_and_let_out(tracing: dict[str, Any] | None) -> None:
    rendered = render({"tracing": tracing, "networkPolicy": {"enabled": True}})
    assert "OTEL" not in str(pod(rendered)["containers"][0]["env"])
    assert len(egress(rendered)) == 3


def test_images_that_are_not_published_are_told_when_the_chart_is_installed() -> None:
    warning = "The images coordinator, operator, worker-vllm, worker of ghcr.io/rlhf-operator are not published"
    assert warning in notes()
    assert "--set image.registry=registry.example.com" in notes()
    some = notes("--set=image.operator.repository=mine/operator,image.worker.repository=mine/worker")
    assert "The images coordinator, worker-vllm of ghcr.io" in some
    assert "not published" not in notes("--set=image.registry=registry.example.com")
