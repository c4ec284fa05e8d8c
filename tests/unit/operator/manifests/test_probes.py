"""Probes by which a kubelet detects that a process of a job hangs, and their delays."""

from typing import Any

import pytest
from tests.support.operator.pod_templates import job_with, pods, worker

from rlhf_api.job import RLHFJob
from rlhf_common.names import METRICS_PORT, Group
from rlhf_operator.manifests.rendering import template_hash

WORKERS = {"merged-generation-0", "merged-inference-0", "merged-training-0"}


def job(**policy: Any) -> RLHFJob:
    merged = job_with({})
    document = merged.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    document["spec"]["runPolicy"] = policy
    return RLHFJob.model_validate(document)


def container(pod: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = pod["spec"]["containers"][0]
    return result


def test_every_process_is_asked_whether_it_lives_once_it_has_begun() -> None:
    rendered = pods(job())
    assert rendered.keys() == WORKERS | {"merged-coordinator"}
    for pod in rendered.values():
        for probe in (container(pod)["startupProbe"], container(pod)["livenessProbe"]):
            assert probe["httpGet"] == {"path": "/livez", "port": METRICS_PORT}
            # A coordinator that hangs saves nothing: its 300 s are for one that is asked to end.
            assert probe["terminationGracePeriodSeconds"] == 30


@pytest.mark.parametrize("seconds", [1, 10, 59, 60, 300, 86400])
def test_a_process_is_given_the_patience_of_the_manifest(seconds: int) -> None:
    probe = container(pods(job(hangTimeoutSeconds=seconds))["merged-coordinator"])["livenessProbe"]
    patience = probe["periodSeconds"] * probe["failureThreshold"]
    assert seconds <= patience < seconds + probe["periodSeconds"]
    assert 1 <= probe["timeoutSeconds"] <= probe["periodSeconds"]


def test_nobody_asks_when_it_is_turned_off() -> None:
    for pod in pods(job(hangTimeoutSeconds=0)).values():
        assert not {"livenessProbe", "startupProbe"} & container(pod).keys()


def test_a_template_has_the_last_word() -> None:
    own = {"exec": {"command": ["true"]}, "periodSeconds": 7}
    rendered = pods(job_with(worker(livenessProbe=own)))
    assert container(rendered["merged-generation-0"])["livenessProbe"] == own
    assert "httpGet" in container(rendered["merged-generation-0"])["startupProbe"]


def test_pods_from_before_are_not_replaced_to_get_their_probes() -> None:
    for group in Group:
        assert template_hash(job(), group) == template_hash(job(hangTimeoutSeconds=60), group)
