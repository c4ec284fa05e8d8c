"""Creates, applies, patches, replaces, deletes, gets and lists objects of the cluster.

Rule: takes and returns plain objects.
"""

import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Final

from rlhf_common import names
from rlhf_operator.api_client.connection import find_connection
from rlhf_operator.api_client.errors import ConflictError, MissingError
from rlhf_operator.api_client.resources import CORE_RESOURCES, Resource, ResourceTable, table_kind
from rlhf_operator.api_client.transport import ApiRequest, Json, Transport, decoded

PAGE: Final = 500
"""Maximum number of objects per page of a list."""
_STRICT: Final = {"fieldValidation": "Strict"}
"""Query that makes the API server refuse unknown fields."""
METADATA_ONLY: Final = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"
METADATA_LIST: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"


async def connect(kubeconfig: Path | None = None, resources: ResourceTable = CORE_RESOURCES) -> "KubernetesClient":
    """Return a client of the cluster of `kubeconfig`, of KUBECONFIG, of this pod, or of ~/.kube/config.

    Raises ConnectionConfigError.
    """
    return KubernetesClient(Transport(await find_connection(kubeconfig, prefer_pod=True)), resources)


class KubernetesClient:
    """Reads and writes objects of the kinds in a table."""

    def __init__(self, transport: Transport, resources: ResourceTable = CORE_RESOURCES) -> None:
        self.transport, self.resources = transport, resources

    async def close(self) -> None:
        """Close all connections."""
        await self.transport.close()

    async def kinds(self, api_version: str) -> frozenset[str]:
        """Return the kinds that the API server serves for an apiVersion; empty if it does not serve that version."""
        group, _, version = api_version.partition("/")
        request = ApiRequest("get", Resource(group, version, ""))
        try:
            served = decoded(await self.transport.request(request, headers={"Accept": "application/json"}))
        except MissingError:
            return frozenset()
        return frozenset(str(resource["kind"]) for resource in served.get("resources") or [])

    async def get(self, kind: str, namespace: str | None, name: str) -> Json | None:
        """Return the object, or None if it does not exist."""
        try:
            return await self._ask("get", kind, namespace, name)
        except MissingError:
            return None

    async def apply(self, manifest: Json) -> Json:
        """Apply on the server with our field manager, taking over fields from others; return the object's metadata.

        If the manifest has a uid, raises ConflictError when the object was replaced or is gone.
        """
        query = {"fieldManager": names.FIELD_MANAGER, "force": "true", **self._strict(manifest)}
        namespace, name = _place(manifest)
        return await self._ask("apply", self._kind(manifest), namespace, name, body=manifest, query=query)

    async def apply_status(self, manifest: Json) -> Json:
        """Apply `status` on the server with the field manager of statuses; return the whole object.

        Raises ConflictError if the object's resourceVersion differs from the manifest's.
        """
        query = {"fieldManager": names.STATUS_FIELD_MANAGER, "force": "true"}
        namespace, name = _place(manifest)
        return await self._ask("apply", manifest["kind"], namespace, name, "status", body=manifest, query=query)

    async def create(self, manifest: Json) -> Json:
        """Create the object; return its metadata. Raises ConflictError if the name is taken."""
        return await self._create(manifest, {})

    async def try_to_create(self, manifest: Json) -> None:
        """Do a dry run of `create`: the API server validates the object but does not store it. Raises InvalidError if
        it is invalid.
        """
        await self._create(manifest, {"dryRun": "All"})

    async def _create(self, manifest: Json, more: Mapping[str, str]) -> Json:
        query = {"fieldManager": names.FIELD_MANAGER, **self._strict(manifest), **more}
        return await self._ask("create", self._kind(manifest), _place(manifest)[0], body=manifest, query=query)

    async def manage_created(self, kind: str, meta: Json) -> None:
        """Move fields that our `create` set to our server-side apply, which can remove only fields that it owns.

        Raises ApiError, such as ConflictError if the object has changed since `meta` was read.
        """
        entries = meta.get("managedFields") or []
        ours = [
            entry for entry in entries if entry.get("manager") == names.FIELD_MANAGER and not entry.get("subresource")
        ]
        if [entry.get("operation") for entry in ours] != ["Update"]:
            return
        managed = [{**entry, "operation": "Apply"} if entry in ours else entry for entry in entries]
        change = [
            {"op": "test", "path": "/metadata/uid", "value": meta["uid"]},
            {"op": "replace", "path": "/metadata/managedFields", "value": managed},
            {"op": "replace", "path": "/metadata/resourceVersion", "value": meta["resourceVersion"]},
        ]
        await self._ask("patch", kind, meta["namespace"], meta["name"], body=change)

    async def replace(self, manifest: Json) -> Json:
        """Replace the object at the manifest's resourceVersion. Raises ConflictError if it has changed since."""
        namespace, name = _place(manifest)
        return await self._ask("update", manifest["kind"], namespace, name, body=manifest)

    async def replace_status(self, manifest: Json) -> Json:
        """Replace `status` of the object at the manifest's resourceVersion. Raises ConflictError if it has changed
        since.
        """
        namespace, name = _place(manifest)
        return await self._ask("update", self._kind(manifest), namespace, name, "status", body=manifest)

    async def delete(
        self, kind: str, namespace: str, name: str, uid: str, *, force: bool = False, grace: int | None = None
    ) -> None:
        """Request the deletion of the object; do nothing if it is gone or has another uid.

        `grace` replaces the pod's own grace period, in seconds; `force` makes it 0.
        """
        options: Json = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": uid}}
        options["propagationPolicy"] = "Background"
        if force or grace is not None:
            options["gracePeriodSeconds"] = 0 if force else grace
        try:
            await self._ask("delete", kind, namespace, name, body=options)
        except (MissingError, ConflictError):
            return

    async def metadata(
        self,
        kind: str,
        namespace: str | None = None,
        labels: str = "",
        on_version: Callable[[int], object] = lambda version: None,
    ) -> AsyncIterator[Json]:
        """Yield the metadata of the objects of a kind with `labels`, page by page, in one namespace or all.

        `on_version` is called for each page with the resourceVersion of the list, or 0.
        """
        selector = {"labelSelector": labels} if labels else {}
        query = {"limit": str(PAGE)} | selector
        while True:
            page = await self._ask("list", kind, namespace, query=query)
            on_version(int(page["metadata"].get("resourceVersion") or 0))
            for item in page.get("items") or []:
                yield item["metadata"]
            following = page["metadata"].get("continue")
            if not following:
                return
            query = {"limit": str(PAGE), "continue": following} | selector

    async def _ask(
        self,
        verb: str,
        kind: str,
        namespace: str | None,
        name: str = "",
        subresource: str = "",
        body: Json | list[Json] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> Json:
        request = ApiRequest(verb, self.resources[kind], namespace, name, subresource)
        sent = yaml_of(body) if verb == "apply" and isinstance(body, dict) else body
        headers = _headers(verb, subresource)
        # The leader may lose its Lease if its request waits behind its own work.
        return decoded(await self.transport.request(request, query, sent, headers, urgent=kind == "Lease"))

    def _kind(self, manifest: Json) -> str:
        return table_kind(self.resources, manifest)

    def _strict(self, manifest: Json) -> Mapping[str, str]:
        """Return the query that refuses unknown fields; empty for gangs and queues, whose older versions may serve
        fewer fields.
        """
        return _STRICT if self._kind(manifest) in CORE_RESOURCES else {}


def _headers(verb: str, subresource: str) -> dict[str, str]:
    if verb == "apply":
        accept = "application/json" if subresource == "status" else METADATA_ONLY
        # With the charset parameter, the client library does not encode the body as JSON again.
        return {"Content-Type": "application/apply-patch+yaml; charset=utf-8", "Accept": accept}
    if verb == "patch":
        return {"Content-Type": "application/json-patch+json", "Accept": METADATA_ONLY}
    if verb == "list":
        return {"Accept": METADATA_LIST}
    return {"Accept": METADATA_ONLY if verb in ("create", "delete") else "application/json"}


def yaml_of(body: Json) -> bytes:
    """Return JSON that is also valid YAML.

    JSON in ASCII may not be: it escapes an emoji as surrogates. Unpaired surrogates are replaced.
    """
    return _NOT_IN_YAML.sub(_escaped, json.dumps(body, ensure_ascii=False)).encode()


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return "\\ufffd" if 0xD800 <= code <= 0xDFFF else f"\\u{code:04x}"


_NOT_IN_YAML: Final = re.compile("[^\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
"""Characters to escape: control characters, YAML's line breaks, the byte order mark, U+FFFE, U+FFFF, and surrogates."""


def _place(manifest: Json) -> tuple[str, str]:
    meta = manifest["metadata"]
    return meta["namespace"], meta["name"]
