"""The RLHFJob definition on a real API server: applied as users do, examples accepted, invalid manifests refused.

The table of invalid manifests is that of the contract's own tests, so that `rlhf validate` and the cluster cannot drift
apart.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import kubernetes
import pytest
import yaml

from .cluster import Cluster, ClusterError
from .processes import wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DEFINITION = ROOT / "crds" / "rlhfjobs.yaml"
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))
# Refused before the schema is looked at, in words of the server's own.
ENVELOPE = {"apiVersion", "kind", "metadata.name"}
ESTABLISH_TIMEOUT = 20.0  # seconds; about one on an idle machine


def load(path: Path) -> ModuleType:
    """Import a module by its file: the contract's tests are no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


CASES = [each for each in load(ROOT / "tests/unit/contract/manifest_cases.py").invalid_cases() if not each.whole_text]


@pytest.fixture(scope="module")
def cluster(api_cluster: Cluster) -> Cluster:
    """The API server with the definition applied client-side, as `kubectl apply -f` does."""
    api_cluster.apply(DEFINITION)
    wait_until("the definition to be Established", lambda: established(api_cluster), ESTABLISH_TIMEOUT)
    return api_cluster


@pytest.fixture(scope="module")
def jobs(cluster: Cluster) -> Iterator[kubernetes.client.CustomObjectsApi]:
    """A client, as one process a manifest would be slow."""
    with kubernetes.config.new_client_from_config(str(cluster.kubeconfig)) as client:
        yield kubernetes.client.CustomObjectsApi(client)


def conditions(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """The definition's conditions by type."""
    found = cluster.get("customresourcedefinition", "rlhfjobs.rlhf.dev")
    return {each["type"]: each for each in found.get("status", {}).get("conditions", [])}


def established(cluster: Cluster) -> bool:
    """True when the definition is served."""
    return conditions(cluster).get("Established", {}).get("status") == "True"


def test_the_definition_is_structural_and_applied_twice_without_a_change(cluster: Cluster) -> None:
    assert "NonStructuralSchema" not in conditions(cluster)
    assert conditions(cluster)["NamesAccepted"]["status"] == "True"
    assert cluster.apply(DEFINITION).strip().endswith("unchanged")
    assert "rlhfjobs" in cluster.kubectl("api-resources", "--api-group=rlhf.dev", "--output=name")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_an_example_is_accepted_by_the_server(cluster: Cluster, path: Path) -> None:
    assert "created (server dry run)" in cluster.apply(path, "--dry-run=server")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_invalid_manifest_gets_the_verdict_of_the_table(jobs: kubernetes.client.CustomObjectsApi, case: Any) -> None:
    verdict = refusal(jobs, yaml.safe_load(case.text))
    if case.cluster_accepts:
        assert verdict is None, verdict
    else:
        assert verdict is not None, "the API server accepts it"
        named = [each["field"] for each in case.problems]
        assert ENVELOPE.intersection(named) or any(field.split("[")[0] in verdict for field in named), verdict


def refusal(jobs: kubernetes.client.CustomObjectsApi, job: dict[str, Any]) -> str | None:
    """The API server's words when it refuses `job`; None when it accepts."""
    namespace = "default"
    try:
        jobs.create_namespaced_custom_object(
            "rlhf.dev", "v1alpha1", namespace, "rlhfjobs", job, dry_run="All", field_validation="Strict"
        )
    except kubernetes.client.ApiException as error:
        if error.status not in (400, 422):
            raise
        return str(json.loads(error.body)["message"])
    return None


def test_a_status_is_written_apart_from_the_spec_and_a_scale_is_read(cluster: Cluster) -> None:
    example = ROOT / "examples" / "grpo.yaml"
    cluster.apply(example)
    name = yaml.safe_load(example.read_text())["metadata"]["name"]
    try:
        cluster.kubectl("scale", f"rlhfjob/{name}", "--replicas=2")
        assert cluster.get("rlhfjob", name)["spec"]["generation"]["replicas"] == 2
        with pytest.raises(ClusterError, match="spec"):
            cluster.kubectl("patch", "rlhfjob", name, "--type=merge", '--patch={"spec":{"seed":8}}')
    finally:
        cluster.kubectl("delete", "rlhfjob", name)
