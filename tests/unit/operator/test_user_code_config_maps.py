"""The ConfigMap of a reward function or an environment: pods that mount it wait for it, and record its content."""

from typing import Any

import pytest

from rlhf_operator.manifests import user_code_mounts
from rlhf_operator.user_code_config_maps import creatable_pods

Json = dict[str, Any]


def pod(name: str, config_map: str | None = None, cost: str | None = None, environment: str | None = None) -> Json:
    """Return a pod that mounts, or not, a reward function, a cost function, and an environment."""
    volumes: list[Json] = [{"name": "tmp", "emptyDir": {}}]
    if config_map:
        volumes.append({"name": "reward", "configMap": {"name": config_map}})
    if cost:
        volumes.append({"name": "reward--cost", "configMap": {"name": cost}})
    if environment:
        volumes.append({"name": "reward--environment", "configMap": {"name": environment}})
    return {
        "metadata": {"name": name, "namespace": "team", "annotations": {"own": "kept"}},
        "spec": {"volumes": volumes},
    }


class StoredObjects:
    """Answers the only kind of request to the cluster."""

    def __init__(self, **config_maps: Json) -> None:
        self.config_maps = config_maps
        self.asked: list[tuple[str, str, str]] = []

    async def get(self, kind: str, namespace: str, name: str) -> Json | None:
        self.asked.append((kind, namespace, name))
        return self.config_maps.get(name)


async def creatable(cluster: StoredObjects, *pods: Json) -> tuple[list[Json], dict[str, str]]:
    return await creatable_pods(cluster, pods)  # type: ignore[arg-type]


async def test_a_pod_says_which_function_it_was_made_with_and_only_a_change_changes_that() -> None:
    def digest_of(text: str, **more: str) -> Any:
        return user_code_mounts.stamped(pod("a", "r"), {"reward": {"data": {"reward.py": text, **more}}})["metadata"][
            "annotations"
        ]

    first = digest_of("def score(): ...")
    assert first["own"] == "kept"
    assert first == digest_of("def score(): ...", other="x")
    assert first[user_code_mounts.CONTENT] != digest_of("def score(): pass")[user_code_mounts.CONTENT]


async def test_the_config_map_is_read_once_a_turn_and_never_without_need() -> None:
    cluster = StoredObjects(r={"data": {"reward.py": "def score(): ..."}})
    ready, lacking = await creatable(cluster, pod("a", "r"), pod("b"), pod("c", "r"))
    assert [item["metadata"]["name"] for item in ready] == ["a", "b", "c"]
    assert [user_code_mounts.CONTENT in item["metadata"]["annotations"] for item in ready] == [True, False, True]
    assert not lacking
    assert cluster.asked == [("ConfigMap", "team", "r")]
    await creatable(cluster, pod("b"))
    assert len(cluster.asked) == 1


@pytest.mark.parametrize(
    ("stored", "says"),
    [
        ({}, "no ConfigMap of this name in namespace team; create it: kubectl create configmap r --namespace=team"),
        ({"r": {"data": {"score.py": "x"}}}, "no key reward.py (its keys: score.py)"),
        ({"r": {"data": {"reward.py": ""}}}, "no key reward.py (its keys: reward.py)"),
        ({"r": {}}, "its keys: none"),
    ],
    ids=["missing", "other key", "empty", "no data"],
)
async def test_a_pod_without_its_function_is_not_made_and_the_others_are(stored: dict[str, Json], says: str) -> None:
    ready, lacking = await creatable(StoredObjects(**stored), pod("coordinator"), pod("inference", "r"))
    assert [item["metadata"]["name"] for item in ready] == ["coordinator"]
    assert lacking.keys() == {"inference"}
    assert lacking["inference"].startswith("spec.models.reward.function.configMap: 'r': ")
    assert says in lacking["inference"]


async def test_a_pod_that_lacks_the_function_of_costs_alone_is_not_made_and_is_stamped_with_both() -> None:
    reward = {"r": {"data": {"reward.py": "def score(): ..."}}}
    _, lacking = await creatable(StoredObjects(**reward), pod("inference", "r", "c"))
    assert lacking["inference"].startswith("spec.models.cost.function.configMap: 'c': no ConfigMap")
    digests = set()
    for text in ("def harm(): ...", "def harm(): pass"):
        ready, _ = await creatable(StoredObjects(**reward, c={"data": {"reward.py": text}}), pod("inference", "r", "c"))
        digests.add(ready[0]["metadata"]["annotations"][user_code_mounts.CONTENT])
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("stored", "says"),
    [
        ({}, "no ConfigMap of this name in namespace team; create it: kubectl create configmap e --namespace=team"),
        ({"e": {"data": {"reward.py": "x"}}}, "no key environment.py (its keys: reward.py)"),
    ],
    ids=["missing", "other key"],
)
async def test_a_pod_without_its_environment_is_not_made(stored: dict[str, Json], says: str) -> None:
    ready, lacking = await creatable(StoredObjects(**stored), pod("training"), pod("generation", environment="e"))
    assert [item["metadata"]["name"] for item in ready] == ["training"]
    assert lacking["generation"].startswith("spec.rollout.environment.configMap: 'e': ")
    assert says in lacking["generation"]
    assert lacking["generation"].endswith("--from-file=environment.py=<your file>")


async def test_one_config_map_may_hold_both_and_a_change_of_either_is_told() -> None:
    digests = set()
    for reward, environment in (("a", "b"), ("a", "c"), ("d", "b")):
        both = StoredObjects(both={"data": {"reward.py": reward, "environment.py": environment}})
        ready, lacking = await creatable(both, pod("generation", "both", environment="both"))
        assert not lacking
        assert both.asked == [("ConfigMap", "team", "both")]
        digests.add(ready[0]["metadata"]["annotations"][user_code_mounts.CONTENT])
    assert len(digests) == 3
