"""Events of a job are listed in order: kubectl sorts them by name, because none has a last time."""

from typing import Any, cast

from rlhf_operator.api_client.client import KubernetesClient
from rlhf_operator.events import EventPoster
from rlhf_operator.reconcile.reconcile_plan import JobEvent

JOB: dict[str, Any] = {"metadata": {"name": "job", "namespace": "team", "uid": "u", "resourceVersion": "1"}}


class EventServer:
    """Stores created events."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    async def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self.events.insert(0, manifest)
        return manifest


async def test_the_names_of_events_sort_by_time() -> None:
    server = EventServer()
    poster = EventPoster(cast(KubernetesClient, server), "operator-0")
    reasons = [f"R{number}" for number in range(300)]
    for reason in reasons:
        poster.post(JOB, JobEvent(reason, "something happened"))
    await poster.close()
    listed = sorted(server.events, key=lambda event: str(event["metadata"]["name"]))
    assert [event["reason"] for event in listed] == reasons
    assert all(event["metadata"]["name"].startswith("job.") for event in listed)
