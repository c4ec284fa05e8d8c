"""The Helm chart on an API server: accepted as a whole, installed, upgraded and uninstalled under a job that stays.

Rule: the operator itself runs with the rights of the chart's service account, and no request is refused. The server
enforces OwnerReferencesPermissionEnforcement, as OpenShift does, because one grant exists for it only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import kubernetes
import pytest
import yaml
from tests.cluster import toolchain
from tests.cluster.audit import Audit
from tests.cluster.cluster import Cluster, ClusterError
from tests.cluster.operating.job_fixture import SHARED_FILES
from tests.cluster.operator_process import OperatorProcess
from tests.cluster.processes import wait_until
from tests.cluster.releases.chart import (
    CHART,
    EVERYTHING,
    FLAVORS,
    HOME,
    LEASE,
    RELEASE,
    ROOT,
    SCHEDULING,
    USED,
    pod,
    render,
    triples,
)

from rlhf_api.job import RLHFJob
from rlhf_api.manifest import load
from rlhf_operator import manifests
from rlhf_operator.gang.apis import KUEUE, MODES

pytestmark = pytest.mark.full


ACCOUNT = f"system:serviceaccount:{HOME}:{RELEASE}"
PATIENCE = 240.0  # seconds for one wait
DEFINITION = "customresourcedefinition/rlhfjobs.rlhf.dev"
NOT_ASKED_HERE = {
    ("rlhf.dev", "rlhfjobs", "delete"),  # a job whose time to live is over
    ("rlhf.dev", "rlhfjobs/finalizers", "update"),  # no separate request: admission looks it up
    ("", "pods", "get"),  # an existing pod
    ("", "secrets", "get"),  # certificates of a job that is older than a minute
    ("", "pods", "patch"),  # the label of the migration pool
    # Existing objects change when their job is edited, a certificate is renewed, or another version comes.
    ("", "services", "patch"),
    ("", "configmaps", "patch"),
    ("", "secrets", "patch"),
    ("networking.k8s.io", "networkpolicies", "patch"),
    # Objects that no watch has reported, and the ConfigMap of a reward.
    ("rlhf.dev", "rlhfjobs", "get"),
    ("", "services", "get"),
    ("", "configmaps", "get"),
    ("networking.k8s.io", "networkpolicies", "get"),
}


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> Audit:
    """Return the audit log of the API server."""
    return Audit(tmp_path_factory.mktemp("audit"))


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, audit: Audit) -> Iterator[Cluster]:
    """Yield a separate API server, because the definition belongs to the release here."""
    failed_before = request.session.testsfailed
    admission = "--enable-admission-plugins=NodeRestriction,OwnerReferencesPermissionEnforcement"
    result = Cluster(level="api", component_args={"kube-apiserver": [admission, *audit.arguments]}).start()
    try:
        yield result
    finally:
        result.stop(failed=request.session.testsfailed > failed_before)


@pytest.fixture
def installed(cluster: Cluster) -> Iterator[Cluster]:
    """Yield the installed release; its definition is removed afterwards."""
    cluster.helm("install", RELEASE, str(CHART), f"--namespace={HOME}", "--create-namespace")
    cluster.wait_defined("rlhfjobs.rlhf.dev")
    try:
        yield cluster
    finally:
        cluster.helm("uninstall", RELEASE, f"--namespace={HOME}", "--ignore-not-found")
        cluster.kubectl("delete", DEFINITION, "--ignore-not-found")


def job(name: str, namespace: str) -> dict[str, Any]:
    """Return a job of the examples."""
    body: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "grpo.yaml").read_text())
    body["metadata"] = {"name": name, "namespace": namespace}
    for group in ("generation", "inference", "training"):
        body["spec"][group]["template"] = SHARED_FILES
    return body


def test_the_server_accepts_everything_rendered_and_its_pods_are_restricted(cluster: Cluster) -> None:
    level = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.add_namespace(HOME, level)
    for path in toolchain.monitor_definitions():
        cluster.kubectl("apply", "--server-side", f"--filename={path}")
        cluster.wait_defined(path.stem.partition("_")[2] + ".monitoring.coreos.com")
    for values in ({}, EVERYTHING, {"watchNamespaces": [HOME]}):
        rendered = render(values)
        reported = cluster.apply(rendered.values(), "--server-side", "--dry-run=server", "--validate=strict")
        assert reported.count("serverside-applied (server dry run)") == len(rendered)
        name = str(values.get("fullnameOverride", RELEASE))
        metadata = {"name": "operator", "namespace": HOME}
        candidate = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod(rendered, name)}
        assert "created" in cluster.apply(candidate, "--dry-run=server")


def range_of_users(namespace: str) -> list[dict[str, Any]]:
    """Return OpenShift's check of pods before it sets their user: a user outside the range is refused."""
    kind, name = "ValidatingAdmissionPolicy", "range-of-users"
    own = [f"!has(object.spec.securityContext.{item})" for item in ("runAsUser", "fsGroup")]
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    own_namespace = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    version = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": name}}
    judged = [{"expression": " && ".join(own), "message": "not of this namespace's range"}]
    return [
        {**version, "kind": kind, "spec": {"matchConstraints": {"resourceRules": [rule]}, "validations": judged}},
        {
            **version,
            "kind": f"{kind}Binding",
            "spec": {"policyName": name, "validationActions": ["Deny"], "matchResources": own_namespace},
        },
    ]


def test_a_cluster_that_chooses_the_user_takes_pods_of_operator_and_jobs_that_name_none(cluster: Cluster) -> None:
    namespace = "ranged"
    level = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.add_namespace(namespace, level)
    cluster.apply(range_of_users(namespace))

    def pods(user: int | None) -> list[dict[str, Any]]:
        metadata = {"name": "operator", "namespace": namespace}
        rendered = render({"podSecurity": {"runAsUser": user}})
        trained = manifests.render(load_job(namespace), {}, manifests.Images(user=user)).pods
        return [{"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod(rendered)}, *trained]

    def refused(body: dict[str, Any]) -> bool:
        try:
            cluster.apply(body, "--dry-run=server")
        except ClusterError as error:
            return "not of this namespace's range" in str(error)
        return False

    wait_until("users of ours to be refused", lambda: all(map(refused, pods(10001))), PATIENCE)
    for body in pods(None):
        assert "created (server dry run)" in cluster.apply(body, "--dry-run=server")


def load_job(namespace: str) -> RLHFJob:
    """Return a job of the examples, resolved."""
    result = load(ROOT / "examples" / "grpo.yaml")
    return result.model_copy(update={"metadata": {"name": "ranged", "namespace": namespace}})


def test_a_job_outlives_upgrade_uninstall_and_a_second_install(installed: Cluster) -> None:
    installed.apply(job("kept", "default"))
    uid = installed.get("rlhfjob", "kept")["metadata"]["uid"]
    place = f"--namespace={HOME}"
    notes = installed.helm("upgrade", RELEASE, str(CHART), place, "--set=controller.replicas=2")
    assert "all namespaces" in notes
    assert installed.get("deployment", RELEASE, place)["spec"]["replicas"] == 2
    assert installed.get("poddisruptionbudget", RELEASE, place)
    with pytest.raises(ClusterError, match="schema"):
        installed.helm("upgrade", RELEASE, str(CHART), place, "--set=controller.replica=2")
    installed.helm("uninstall", RELEASE, place)
    kinds = "deployments,services,serviceaccounts,roles,rolebindings,poddisruptionbudgets"
    assert installed.get(kinds, place)["items"] == []
    assert installed.get("clusterroles", f"--selector=app.kubernetes.io/instance={RELEASE}")["items"] == []
    assert installed.get("rlhfjob", "kept")["metadata"]["uid"] == uid
    installed.helm("install", RELEASE, str(CHART), place)
    assert installed.get("rlhfjob", "kept")["metadata"]["uid"] == uid


def rights(kubeconfig: Path, namespace: str) -> set[tuple[str, str, str]]:
    """Return (group, resource, verb) that RBAC grants a user in a namespace, according to the API server."""
    with kubernetes.config.new_client_from_config(str(kubeconfig)) as client:
        review = kubernetes.client.V1SelfSubjectRulesReview(
            spec=kubernetes.client.V1SelfSubjectRulesReviewSpec(namespace=namespace)
        )
        answer = kubernetes.client.AuthorizationV1Api(client).create_self_subject_rules_review(review)
    return {
        (group, resource, verb)
        for rule in answer.status.resource_rules
        for group in rule.api_groups or []
        for resource in rule.resources or []
        for verb in rule.verbs
        # Questions that every authenticated user may ask about itself.
        if group not in ("authentication.k8s.io", "authorization.k8s.io")
    }


def listed(cluster: Cluster, *resource: str) -> bool:
    """Return whether any of these objects exist."""
    return bool(cluster.get(*resource)["items"])


def until_rights(account: Path, namespace: str, expected: set[tuple[str, str, str]]) -> None:
    """Wait until RBAC grants a user exactly these rights: the API server learns of roles through its own watches."""
    with contextlib.suppress(TimeoutError):
        wait_until("the rights", lambda: rights(account, namespace) == expected, PATIENCE)
    assert rights(account, namespace) == expected


def test_the_service_account_has_the_rights_of_the_table_and_no_other(installed: Cluster) -> None:
    account = installed.user(ACCOUNT)
    until_rights(account, "default", triples(USED))
    until_rights(account, HOME, triples(USED) | triples(LEASE))
    installed.add_namespace("team-a")
    installed.helm("upgrade", RELEASE, str(CHART), f"--namespace={HOME}", "--set=watchNamespaces={team-a}")
    until_rights(account, "team-a", triples(USED))
    until_rights(account, HOME, triples(LEASE))
    until_rights(account, "default", set())


def test_a_gang_that_is_switched_on_brings_the_rights_of_its_table_and_takes_them_along(installed: Cluster) -> None:
    account, upgrade = (
        installed.user(ACCOUNT),
        ("upgrade", RELEASE, str(CHART), f"--namespace={HOME}", "--reset-values"),
    )
    for mode in MODES:
        name = mode.lower()
        installed.helm(*upgrade, f"--set=scheduling.{name}=true")
        of_cluster = triples(FLAVORS) if mode == KUEUE else set()
        until_rights(account, "default", triples(USED | SCHEDULING[name]) | of_cluster)
    installed.add_namespace("team-c")
    every = ",".join(f"scheduling.{mode.lower()}=true" for mode in MODES)
    installed.helm(*upgrade, f"--set={every},watchNamespaces={{team-c}}")
    everything = triples(USED).union(*map(triples, SCHEDULING.values()))
    until_rights(account, "team-c", everything | triples(FLAVORS))
    until_rights(account, "default", triples(FLAVORS))  # they belong to no namespace
    installed.helm(*upgrade)
    until_rights(account, "default", triples(USED))


@pytest.mark.parametrize("watched", ["", "team-b"], ids=["cluster-wide", "one namespace"])
def test_the_operator_works_with_the_rights_of_the_chart(installed: Cluster, watched: str, audit: Audit) -> None:
    namespace, chosen = watched or "default", [f"--namespace={watched}"] if watched else []
    if watched:
        installed.add_namespace(watched)
        install = ("upgrade", RELEASE, str(CHART), f"--namespace={HOME}", f"--set=watchNamespaces={{{watched}}}")
        installed.helm(*install)
    place, account = f"--namespace={namespace}", installed.user(ACCOUNT)
    # An operator that sends requests before the API server knows its roles is refused, and reports that.
    until_rights(account, namespace, triples(USED))
    until_rights(account, HOME, triples(LEASE) if watched else triples(USED) | triples(LEASE))

    def pods() -> int:
        return len(installed.get("pods", place)["items"])

    def renewed() -> bool:
        lease = installed.get("lease", "rlhf-operator", f"--namespace={HOME}")["spec"]
        return bool(lease["renewTime"] > lease["acquireTime"])

    with OperatorProcess(installed, f"--lease-namespace={HOME}", *chosen, kubeconfig=account) as operator:
        granted = job("granted", namespace)
        granted["spec"]["checkpoints"]["onDeletion"] = "Save"
        installed.apply(granted)
        wait_until("the pods of the job", lambda: pods() > 3, PATIENCE, check=operator.check)
        for item in ("services", "configmaps", "secrets", "networkpolicies"):
            of_the_job = (item, place, "--selector=rlhf.dev/job-name=granted")
            wait_until(item, partial(listed, installed, *of_the_job), PATIENCE, check=operator.check)
        installed.kubectl("patch", "rlhfjob", "granted", place, "--type=merge", '--patch={"spec":{"suspend":true}}')
        wait_until("no pods of the suspended job", lambda: pods() == 0, PATIENCE, check=operator.check)
        wait_until("an event", lambda: installed.get("events.events.k8s.io", place)["items"], PATIENCE)
        installed.kubectl("delete", "rlhfjob", "granted", place)
        wait_until("the Lease to be renewed", renewed, PATIENCE, check=operator.check)
        assert operator.stop() == 0
    said = operator.log.read_text().lower()
    assert "forbidden" not in said
    assert "refused" not in said
    with contextlib.suppress(TimeoutError):  # its last requests may be on their way to the log
        used = triples(USED | LEASE) - NOT_ASKED_HERE
        wait_until("the rights to be used", lambda: used <= audit.used(ACCOUNT), PATIENCE)
    assert triples(USED | LEASE) - audit.used(ACCOUNT) <= NOT_ASKED_HERE
