"""API discovery is repeated, and only an answer changes its result."""

import asyncio

import pytest

from rlhf_operator.api_client.client import KubernetesClient
from rlhf_operator.api_client.errors import UnavailableError
from rlhf_operator.gang import discovery
from rlhf_operator.gang.apis import KUEUE, MODES, NATIVE, ServedApis

V1BETA2 = "kueue.x-k8s.io/v1beta2"


class DiscoveryServer(KubernetesClient):
    """Gives the next answer of the list; None means no answer."""

    def __init__(self, *turns: dict[str, set[str]] | None) -> None:
        self.turns = list(turns)

    async def kinds(self, api_version: str) -> frozenset[str]:
        now = self.turns[0]
        if now is None:
            self.turns.pop(0)
            raise UnavailableError("no answer")
        return frozenset(now.get(api_version, ()))


def test_a_version_counts_when_it_serves_every_kind_that_is_made() -> None:
    api = DiscoveryServer({"scheduling.k8s.io/v1alpha2": {"Workload"}, "scheduling.k8s.io/v1alpha1": {"Workload"}})
    result = asyncio.run(discovery.served(api))
    assert result.usable() == {NATIVE: "scheduling.k8s.io/v1alpha1"}
    assert result.watched() == {"scheduling.k8s.io/v1alpha1/Workload": ("scheduling.k8s.io", "v1alpha1", "workloads")}


def test_what_is_switched_off_is_not_asked_for() -> None:
    result = asyncio.run(discovery.served(DiscoveryServer({V1BETA2: {"Workload"}}), [NATIVE]))
    assert result.usable() == {}
    assert result.off == set(MODES) - {NATIVE}


def test_the_first_answer_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "RETRY_SECONDS", 0.0)
    result = asyncio.run(discovery.first(DiscoveryServer(None, None, {V1BETA2: {"Workload"}}), MODES))
    assert result.usable() == {KUEUE: V1BETA2}


def test_no_answer_changes_nothing_and_another_answer_ends_the_watch() -> None:
    served_before = ServedApis(frozenset([V1BETA2]))
    api = DiscoveryServer(None, {V1BETA2: {"Workload"}})

    async def watch(api: KubernetesClient) -> None:
        await asyncio.wait_for(discovery.changed(api, served_before, every=0.0), 30)

    async def unchanged() -> bool:
        task = asyncio.create_task(watch(api))
        await asyncio.sleep(0.05)
        still = not task.done()
        task.cancel()
        return still

    assert asyncio.run(unchanged())
    with pytest.raises(discovery.ApisChangedError, match="restarts to use it"):
        asyncio.run(watch(DiscoveryServer(None, {})))
