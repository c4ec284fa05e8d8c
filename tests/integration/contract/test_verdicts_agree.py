"""`rlhf validate` gives the same verdict on more than a hundred manifests as the API server and the operator together.

The API server's part is its schema, its rules and a dry run of the pods; the operator's is its admission. Both are
real: a manifest is created (as a dry run), the resulting object is admitted, and its pods are tried.
"""

import asyncio
from typing import Any

import yaml
from tests.cluster import Cluster
from tests.support.manifests.manifest_cases import Verdict, verdicts
from tests.support.manifests.served_definition import ServedDefinition

from rlhf_api.problems import Severity
from rlhf_cli.load_job import load_documents
from rlhf_common.names import KIND
from rlhf_operator.api_client.client import connect
from rlhf_operator.manifests import Images
from rlhf_operator.pod_dry_run import Trials
from rlhf_operator.reconcile.parsed_job import parse_job

ACCOUNT = {
    "apiVersion": "v1",
    "kind": "ServiceAccount",
    "metadata": {"name": "default", "namespace": "default"},
}


def of_validate(case: Verdict) -> str:
    problems = [problem for document in load_documents(case.text) for problem in document.problems]
    if any(problem.severity is not Severity.WARNING for problem in problems):
        return "invalid"
    return "warning" if problems else "valid"


def of_cluster(
    served: ServedDefinition, trials: Trials, loop: asyncio.AbstractEventLoop, case: Verdict
) -> tuple[str, str]:
    """Return (verdict, message) of the cluster."""
    documents = [item for item in yaml.safe_load_all(case.text) if item["kind"] == KIND]
    result = [_of_job(served, trials, loop, document) for document in documents]
    order = ["invalid", "warning", "valid"]
    return min(result, key=lambda each: order.index(each[0]))


def _of_job(
    served: ServedDefinition, trials: Trials, loop: asyncio.AbstractEventLoop, job: dict[str, Any]
) -> tuple[str, str]:
    stored, causes = served.created({**job, "metadata": job.get("metadata") or {}})
    if causes:
        return "invalid", str(causes)
    admission = parse_job(stored)
    if not admission.planned:
        return "invalid", admission.problem
    if refused := loop.run_until_complete(trials.verdict("default/job", stored, {})):
        return "invalid", refused
    return ("warning", admission.warnings) if admission.warnings else ("valid", "")


def test_both_sides_give_the_same_verdicts(served: ServedDefinition, api_cluster: Cluster) -> None:
    # There are no controllers here to create one in every namespace.
    api_cluster.apply(ACCOUNT)
    differ: list[str] = []
    loop = asyncio.new_event_loop()
    try:
        cluster = loop.run_until_complete(connect(api_cluster.kubeconfig))
        for case in verdicts():
            ours = of_validate(case)
            # New trials, because they remember the verdict on an earlier row for a job of the same generation.
            theirs, words = of_cluster(served, Trials(cluster, Images()), loop, case)
            if (ours, theirs) != (case.verdict, case.verdict):
                reported = [str(problem) for document in load_documents(case.text) for problem in document.problems]
                differ.append(
                    f"{case.name}: wanted {case.verdict}, validate {ours} {reported}, cluster {theirs} {words}"
                )
        loop.run_until_complete(cluster.close())
    finally:
        loop.close()
    assert not differ, "\n".join(differ)
