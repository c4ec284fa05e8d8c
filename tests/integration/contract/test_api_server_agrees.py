"""A real API server and `rlhf validate` give the same verdicts, and name the same fields with the same messages.

Both sides come from one set of models and rules; the test checks that CEL, defaulting and pruning mean the same to the
API server as to the Python side.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster import Cluster
from tests.support import algorithms
from tests.support.manifests.manifest_cases import EXAMPLES, Case, changed, invalid_cases
from tests.support.manifests.served_definition import KIND, ServedDefinition

from rlhf_api import crd
from rlhf_api.manifest import ManifestError, Problem, parse
from rlhf_api.rules.table import RULES
from rlhf_api.rules.unavailable import UNAVAILABLE
from rlhf_api.yaml_document import read_document
from rlhf_common.names import GROUP, PLURAL

SEED = 20260822
RULE_WORDS = tuple(rule.message for rule in RULES)
MANIFESTS = 150  # random manifests

# Values around every limit of a rule; each manifest has a few of them.
CHANGES: dict[str, list[Any]] = {
    "spec.rollout.batchSize": [0, 1, 32, 64, 100, 512, 4096],
    "spec.rollout.temperature": [0, 0.5, 1],
    "spec.algorithm.ppo": [{}, {"miniBatchSize": 32}, {"miniBatchSize": 0}, {"klCoefficient": 0, "klTarget": 1}, None],
    "spec.algorithm.grpo": [{}, {"groupSize": 6}, {"groupSize": 4, "miniBatchSize": 32}, None],
    "spec.algorithm.plugin": [{**algorithms.SMALL["plugin"], "parameters": {"any": [1]}}, {"name": "A"}, None],
    "spec.models.critic": [{"path": "c"}, None],
    "spec.models.reward": [{"endpoint": {"url": "http://x"}}, {}, {"model": {"path": "m"}, "endpoint": {"url": "x"}}],
    "spec.training.microBatchSize": [1, 5, 8, 64, 1.0, 1.5],
    "spec.training.microBatchTokens": [0, 1, 4096, None, "4k"],
    "spec.training.packing": [True, False, "true"],
    "spec.training.sharedPrompts": ["Disabled", "Auto", "Enabled", "On"],
    "spec.training.parallelism": [{"data": 3}, {"data": 8}, {"pipeline": 200, "data": 100}, None],
    "spec.training.schedule": [{"mode": "OneFOneB"}, {"mode": "Zero"}],
    "spec.training.gpusPerReplica": [0, 1, 2],
    "spec.training.ranksPerPod": [1, 2, 3],
    "spec.training.optimizer.maxGradientNorm": [0, None, 0.5, -1],
    "spec.fusion.intraStage.mode": ["Disabled", "Auto", "Fused", False],
    "spec.generation.engine": ["torch", "vllm", "my_package.my_engine", "trch"],
    "spec.generation.replicas": [0, 1, 4096, 4097],
    "spec.generation.gpusPerReplica": [0, 1, 2, 3, 4],
    "spec.generation.parallelism.tensor": [1, 2, 3],
    "spec.inference.replicas": [0, 1],
    "spec.suspend": [True, False, "true"],
    "spec.scheduling.gang": [{"mode": "Volcano", "queue": "q"}, {"queue": "q"}, {"timeoutSeconds": 5}, {"mode": False}],
    "spec.managedBy": ["rlhf.dev/operator", "kueue.x-k8s.io/multikueue", "x"],
    "spec.seed": [0, 2**53 - 1, 2**53, -1],
    "metadata.name": ["a", "a" * 47, "a" * 48, "A", "-a", "a-", "7a", "a.b", "a-coordinator"],
}


def problems(text: str) -> list[Problem]:
    """Return the command line's problems, without those that only this version has."""
    lacks = {lack.field: lack for lack in UNAVAILABLE}
    try:
        parse(text)
    except ManifestError as error:
        return [
            problem
            for problem in error.problems
            if "not available in this version" not in problem.message or problem.field not in lacks
        ]
    return []


def assert_same(served: ServedDefinition, text: str) -> None:
    ours, theirs = problems(text), served.created(read_document(text).data)[1]
    assert bool(ours) == bool(theirs), f"{text}\nrlhf validate: {list(map(str, ours))}\nAPI server: {theirs}"
    if any("some validation rules were not checked" in message for _, message in theirs):
        return
    for problem in ours:
        if problem.message.startswith(RULE_WORDS):
            # A union's messages continue with the found value; the API server's stop before that.
            words = problem.message.partition(", got")[0]
            assert any(field == problem.field and words in message for field, message in theirs), (problem, theirs)


TABLE = [case for case in invalid_cases() if not case.whole_text]


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_table_gets_the_same_verdict(served: ServedDefinition, case: Case) -> None:
    assert bool(served.created(read_document(case.text).data)[1]) != case.cluster_accepts
    if not case.cluster_accepts:  # test_verdicts_agree.py covers what only the operator refuses
        assert_same(served, case.text)


def test_random_manifests_get_the_same_verdict(served: ServedDefinition) -> None:
    print(f"seed {SEED}")
    random_ = random.Random(SEED)
    refused = 0
    for _ in range(MANIFESTS):
        paths = random_.sample(sorted(CHANGES), random_.randint(1, 3))
        put = {path: random_.choice(CHANGES[path]) for path in paths}
        text = changed(random_.choice(["ppo", "grpo"]), put, [])
        assert_same(served, text)
        refused += bool(problems(text))
    assert MANIFESTS // 5 < refused < MANIFESTS * 4 // 5  # otherwise the values above test one side only


def test_definition_is_structural_and_applied_twice_without_a_change(
    served: ServedDefinition, api_cluster: Cluster
) -> None:
    customresourcedefinition = api_cluster.get("customresourcedefinition", f"{PLURAL}.{GROUP}")
    conditions = {
        condition["type"]: condition["status"] for condition in customresourcedefinition["status"]["conditions"]
    }
    assert "NonStructuralSchema" not in conditions
    assert conditions["NamesAccepted"] == "True"
    assert api_cluster.apply(crd.PATH).strip().endswith("unchanged")


OBJECTS = sorted(path for path in EXAMPLES.rglob("*.yaml") if path.parent.name != "prometheus")
"""Every example but the configuration of Prometheus, which is no API object."""


@pytest.mark.parametrize("path", OBJECTS, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_example_is_accepted(served: ServedDefinition, api_cluster: Cluster, path: Path) -> None:
    assert "created (server dry run)" in api_cluster.apply(path, "--dry-run=server")


def test_scale_and_columns(served: ServedDefinition, api_cluster: Cluster) -> None:
    text = changed("ppo", {"metadata.name": "shown"}, [])
    served.store(yaml.safe_load(text))
    now = "2026-08-22T10:00:00Z"
    running = {"type": "Running", "status": "True", "reason": "Running", "message": "", "lastTransitionTime": now}
    status = {
        "algorithm": "ppo",
        "conditions": [{**running, "type": "Planned", "reason": "PlanMade"}, running],
        "progress": {"iteration": 37, "iterations": 100, "summary": "37/100", "reward": 0.5, "lastUpdateTime": now},
        "migrationPool": {"replicas": 1, "generationReplicas": 4, "threshold": 30, "summary": "1/4"},
        "scale": {"replicas": 4, "selector": "rlhf.dev/job-name=shown"},
    }
    try:
        served.api.patch_namespaced_custom_object_status(*KIND, "shown", {"status": status})
        header, row = api_cluster.kubectl("get", "rlhf", "shown").splitlines()
        assert header.split() == ["NAME", "ALGORITHM", "PHASE", "ITERATION", "REWARD", "SAMPLES/S", "POOL", "AGE"]
        assert row.split()[:5] == ["shown", "ppo", "Running", "37/100", "0.5"]
        api_cluster.kubectl("scale", "rlhf", "shown", "--replicas=2")
        job = served.api.get_namespaced_custom_object(*KIND, "shown")
        assert job["spec"]["generation"]["replicas"] == 2
    finally:
        served.remove("shown")
