"""RLHFJobs that a real API server accepts or refuses: dry runs of creations, replacements and status patches.

Uses one client for all, because one process per manifest would be slow.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kubernetes import client, config
from tests.cluster import Cluster
from tests.cluster.processes import wait_until

from rlhf_api import crd
from rlhf_common.names import GROUP, PLURAL, VERSION

Json = dict[str, Any]
Causes = list[tuple[str, str]]

KIND: Final = (GROUP, VERSION, "default", PLURAL)
SERVED_TIMEOUT: Final = 60.0  # seconds until a new kind is served


@dataclass(frozen=True)
class ServedDefinition:
    """The jobs of namespace default. `created`, `replaced` and `status` are dry runs: nothing is stored."""

    api: client.CustomObjectsApi

    def created(self, job: Json) -> tuple[Json, Causes]:
        """Return (object as it would be stored, the API server's objections)."""
        return _asked(
            lambda: self.api.create_namespaced_custom_object(*KIND, job, dry_run="All", field_validation="Strict")
        )

    def replaced(self, name: str, job: Json) -> Causes:
        """Return the API server's objections to replacing the stored job with `job`."""
        version = self.api.get_namespaced_custom_object(*KIND, name)["metadata"]["resourceVersion"]
        body = {**job, "metadata": {"name": name, "resourceVersion": version}}
        return _asked(lambda: self.api.replace_namespaced_custom_object(*KIND, name, body, dry_run="All"))[1]

    def status(self, name: str, status: Json) -> tuple[Json, Causes]:
        """Return (object as it would be stored, the API server's objections) for a status of the stored job `name`."""
        body = {"status": status}
        return _asked(
            lambda: self.api.patch_namespaced_custom_object_status(
                *KIND, name, body, dry_run="All", field_validation="Strict"
            )
        )

    def store(self, job: Json) -> str:
        """Create a job; return its name."""
        self.api.create_namespaced_custom_object(*KIND, job)
        return str(job["metadata"]["name"])

    def remove(self, name: str) -> None:
        """Delete a job."""
        self.api.delete_namespaced_custom_object(*KIND, name)


def _asked(request: Callable[[], Json]) -> tuple[Json, Causes]:
    """Return the answer, or the objections; while a definition is replaced, its storage may be unavailable."""
    deadline = time.monotonic() + SERVED_TIMEOUT
    while True:
        try:
            return request(), []
        except client.ApiException as error:
            if error.status == 503 and time.monotonic() < deadline:
                time.sleep(0.5)
                continue
            if error.status not in (400, 422):
                raise
            status = json.loads(error.body)
        result = [(cause.get("field", ""), cause["message"]) for cause in status.get("details", {}).get("causes", [])]
        return {}, result or [("", status["message"])]


def serve(cluster: Cluster) -> ServedDefinition:
    """Apply the definition client-side like `kubectl apply -f` (it must fit the annotation), and wait for it."""
    cluster.apply(crd.PATH)
    api = client.CustomObjectsApi(config.new_client_from_config(str(cluster.kubeconfig)))

    def listed() -> bool:
        # Not `kubectl wait`, which fails while the definition has no conditions at all.
        try:
            api.list_namespaced_custom_object(*KIND)
        except client.ApiException as error:
            if error.status != 404:
                raise
            return False
        return True

    wait_until("the API server to serve RLHFJobs", listed, SERVED_TIMEOUT)
    return ServedDefinition(api)
