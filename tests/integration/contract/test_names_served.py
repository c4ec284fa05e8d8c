"""A rule of a later definition applies to new jobs only: a stored job stays writable on an API server."""

import copy
from typing import Any

import yaml
from tests.cluster import Cluster
from tests.cluster.processes import wait_until
from tests.support.manifests.manifest_cases import changed
from tests.support.manifests.served_definition import KIND, ServedDefinition

from rlhf_api import crd
from rlhf_api.manifest import parse_stored

NAME = "x-coordinator"
PATIENCE = 240.0  # seconds until the API server uses another definition


def of_new_jobs(definition: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rules of a definition that apply to new jobs only."""
    result = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["x-kubernetes-validations"]
    return [item for item in result if item.get("optionalOldSelf")]


def earlier() -> dict[str, Any]:
    """Return the earlier definition without them."""
    definition = copy.deepcopy(crd.definition())
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    schema["x-kubernetes-validations"] = [
        item for item in schema["x-kubernetes-validations"] if not item.get("optionalOldSelf")
    ]
    return definition


def job() -> dict[str, Any]:
    body: dict[str, Any] = yaml.safe_load(changed("ppo", {"metadata.name": NAME}, []))
    return body


def test_a_job_that_is_older_than_the_rule_stays_writable_and_readable(
    served: ServedDefinition, api_cluster: Cluster
) -> None:
    assert of_new_jobs(crd.definition()), "there is such a rule"
    api_cluster.apply(earlier())
    wait_until("the earlier definition", lambda: not served.created(job())[1], PATIENCE)
    served.store(job())
    try:
        api_cluster.apply(crd.PATH)
        other = job() | {"metadata": {"name": "y-coordinator"}}
        wait_until("the definition", lambda: served.created(other)[1], PATIENCE)
        [(field, message)] = served.created(other)[1]
        assert field == "metadata.name"
        assert "must not end in -coordinator" in message
        now = "2026-08-22T10:00:00Z"
        condition = {"type": "Running", "status": "True", "reason": "Running", "message": "", "lastTransitionTime": now}
        status = {"conditions": [condition]}
        written = served.api.patch_namespaced_custom_object_status(*KIND, NAME, {"status": status})
        assert written["status"]["conditions"] == [condition]
        spec = {"iterations": 7, "suspend": True}
        after = served.api.patch_namespaced_custom_object(*KIND, NAME, {"spec": spec})
        assert (after["spec"]["iterations"], after["spec"]["suspend"]) == (7, True)
        finalizer = {"metadata": {"finalizers": ["rlhf.dev/checkpoint"]}}
        served.api.patch_namespaced_custom_object(*KIND, NAME, finalizer)
        last = served.api.patch_namespaced_custom_object(*KIND, NAME, {"metadata": {"finalizers": None}})
        assert parse_stored(last).name == NAME, "the operator goes on with it"
    finally:
        api_cluster.apply(crd.PATH)
        served.remove(NAME)
