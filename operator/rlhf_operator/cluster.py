"""The one file that talks to the Kubernetes API: create, server-side apply, delete, get, list; and what went wrong.

Rule: plain objects in and out, no decision. Never more than `concurrency` requests at once, each with a time-out; but
the Lease waits for nobody, as the leader that waits behind its own work loses it. Every answer that is not success
becomes one of the errors below, named for what a caller can do about it. A write that was
sent may have been carried out even when its answer is lost, so callers must be able to ask again.
"""

import asyncio
import contextlib
import json
import os
import re
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration

from rlhf_api import names
from rlhf_operator.gang import apis
from rlhf_operator.gang.apis import kind_of

Json = dict[str, Any]

CONCURRENCY: Final = 32
"""Requests at once: where a single API server's rate of small writes levels off."""
TIMEOUT_SECONDS: Final = 30.0
"""One request; the API server itself gives up on most after 60."""
PAGE: Final = 500
"""Objects of a list asked for at once."""
_STRICT: Final = {"fieldValidation": "Strict"}
"""An unknown field is refused; otherwise it would vanish, a typo in a user's pod template for one."""
_METADATA_ONLY: Final = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"
_METADATA_LIST: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"

RESOURCES: Final[Mapping[str, tuple[str, str]]] = {
    "Pod": ("/api/v1", "pods"),
    "Service": ("/api/v1", "services"),
    "ConfigMap": ("/api/v1", "configmaps"),
    "Secret": ("/api/v1", "secrets"),
    "NetworkPolicy": ("/apis/networking.k8s.io/v1", "networkpolicies"),
    "Event": ("/apis/events.k8s.io/v1", "events"),
    "Lease": ("/apis/coordination.k8s.io/v1", "leases"),
    names.KIND: (f"/apis/{names.API_VERSION}", names.PLURAL),
    **apis.RESOURCES,
}
"""Kind -> where the API serves it; all are namespaced but some of `gang.apis`."""


class ClusterError(Exception):
    """The API server did not do it."""


class UnavailableError(ClusterError):
    """It could not be reached, or has no time for us: try again later."""


class MissingError(ClusterError):
    """The object does not exist (any more)."""


class ConflictError(ClusterError):
    """The object exists already, or is another than the one that was seen."""


class RefusedError(ClusterError):
    """Somebody has to act first: quota, rights, an invalid object. The message is the API server's."""


class InvalidError(RefusedError):
    """What was sent is wrong in itself: sent again, it would be refused again."""


async def connect(kubeconfig: Path | None = None) -> "Cluster":
    """A client of the cluster this process runs in, or that `kubeconfig` (else KUBECONFIG) names.

    Raises kubernetes.aio.config.ConfigException when there is no way in.
    """
    configuration = Configuration()
    if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
        config.load_incluster_config(client_configuration=configuration)
    else:
        await config.load_kube_config(
            config_file=str(kubeconfig) if kubeconfig else None, client_configuration=configuration
        )
    configuration.connection_pool_maxsize = CONCURRENCY * 2
    configuration.client_session_kwargs = session_options()
    return Cluster(ApiClient(configuration))


def session_options() -> Json:
    """Proxies of the environment where it names any.

    Otherwise nothing of the environment: the HTTP client would look for a ~/.netrc in a thread, twice a request, which
    takes four times as long as the request itself.
    """
    return {"trust_env": bool(urllib.request.getproxies_environment())}


class Cluster:
    """Requests to one API server."""

    def __init__(
        self,
        client: ApiClient,
        concurrency: int = CONCURRENCY,
        on_answer: Callable[[str, str, int], None] | None = None,
    ) -> None:
        """`on_answer(verb, resource, code)` is told every answer; code 0 is none at all."""
        self._client = client
        self._slots = asyncio.Semaphore(concurrency)
        self.on_answer = on_answer or (lambda verb, resource, code: None)

    async def close(self) -> None:
        """Ends all connections."""
        await self._client.close()

    async def kinds(self, api_version: str) -> frozenset[str]:
        """Kinds that the API server serves in a version of a group; none when it does not know the version."""
        try:
            found = await self._request("get", f"/apis/{api_version}", api_version, "apis")
        except MissingError:
            return frozenset()
        return frozenset(str(each["kind"]) for each in found.get("resources") or [])

    async def get(self, kind: str, namespace: str | None, name: str) -> Json | None:
        """The object, or None."""
        try:
            return await self._ask("get", kind, namespace, name)
        except MissingError:
            return None

    async def apply(self, manifest: Json) -> Json:
        """Server-side apply under our field manager; answers the object's metadata.

        It takes fields from other managers. With a uid in the manifest it changes that very object or none:
        ConflictError when it is another by now, or gone.
        """
        query = {"fieldManager": names.FIELD_MANAGER, "force": "true", **_strict(manifest)}
        namespace, name = _place(manifest)
        return await self._ask("apply", kind_of(manifest), namespace, name, body=manifest, query=query)

    async def apply_status(self, manifest: Json) -> Json:
        """Server-side apply of `status` by its own field manager; the whole object comes back.

        ConflictError when the object is another than that of the manifest's resourceVersion.
        """
        query = {"fieldManager": names.STATUS_FIELD_MANAGER, "force": "true"}
        namespace, name = _place(manifest)
        return await self._ask("apply", manifest["kind"], namespace, name, "status", body=manifest, query=query)

    async def create(self, manifest: Json) -> Json:
        """Creates the object; ConflictError when one of its name exists. Answers its metadata."""
        return await self._create(manifest, {})

    async def try_to_create(self, manifest: Json) -> None:
        """A dry run of `create`: everything but the storing, so that what is wrong is raised as RefusedError."""
        await self._create(manifest, {"dryRun": "All"})

    async def _create(self, manifest: Json, more: Mapping[str, str]) -> Json:
        query = {"fieldManager": names.FIELD_MANAGER, **_strict(manifest), **more}
        return await self._ask("create", kind_of(manifest), _place(manifest)[0], body=manifest, query=query)

    async def manage_created(self, kind: str, meta: Json) -> None:
        """Gives fields that our `create` has set to our server-side apply, which can take away only what is its own.

        As client-go's csaupgrade does. `meta` is as read; ConflictError when the object is another by now.
        """
        entries = meta.get("managedFields") or []
        ours = [each for each in entries if each.get("manager") == names.FIELD_MANAGER and not each.get("subresource")]
        if [each.get("operation") for each in ours] != ["Update"]:
            return
        managed = [{**each, "operation": "Apply"} if each in ours else each for each in entries]
        change = [
            {"op": "test", "path": "/metadata/uid", "value": meta["uid"]},
            {"op": "replace", "path": "/metadata/managedFields", "value": managed},
            {"op": "replace", "path": "/metadata/resourceVersion", "value": meta["resourceVersion"]},
        ]
        await self._ask("patch", kind, meta["namespace"], meta["name"], body=change)

    async def replace(self, manifest: Json) -> Json:
        """Replaces the object of the manifest's resourceVersion; ConflictError when it is another by now."""
        namespace, name = _place(manifest)
        return await self._ask("update", manifest["kind"], namespace, name, body=manifest)

    async def replace_status(self, manifest: Json) -> Json:
        """Replaces `status` of the object of that resourceVersion; ConflictError when it is another by now."""
        namespace, name = _place(manifest)
        return await self._ask("update", kind_of(manifest), namespace, name, "status", body=manifest)

    async def delete(
        self, kind: str, namespace: str, name: str, uid: str, *, force: bool = False, grace: int | None = None
    ) -> None:
        """Asks for the deletion of the object if it still is that of `uid`; no error when it is not.

        `grace`: seconds instead of the pod's own.
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
        """Metadata of all objects of a kind that carry `labels`, page by page, in one namespace or all.

        `on_version` is told the version of the whole, which etcd has when it is asked.
        """
        selector = {"labelSelector": labels} if labels else {}
        query = {"limit": str(PAGE)} | selector
        while True:
            answer = await self._ask("list", kind, namespace, query=query)
            on_version(int(answer["metadata"].get("resourceVersion") or 0))
            for each in answer.get("items") or []:
                yield each["metadata"]
            following = answer["metadata"].get("continue")
            if not following:
                return
            query = {"limit": str(PAGE), "continue": following} | selector

    async def _ask(
        self,
        verb: str,
        kind: str,
        namespace: str | None,
        *rest: str,
        body: Json | list[Json] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> Json:
        prefix, plural = RESOURCES[kind]
        path = "/".join([prefix, *(("namespaces", namespace) if namespace else ()), plural, *rest])
        headers = _headers(verb, rest)
        sent = yaml_of(body) if verb == "apply" and isinstance(body, dict) else body
        what = f"{plural} {'/'.join(rest)}".strip()
        return await self._request(verb, path, what, plural, headers, sent, query, slots=kind != "Lease")

    async def _request(
        self,
        verb: str,
        path: str,
        what: str,
        resource: str,
        headers: dict[str, str] | None = None,
        body: Json | list[Json] | bytes | None = None,
        query: Mapping[str, str] | None = None,
        *,
        slots: bool = True,
    ) -> Json:
        headers = headers or _headers(verb, ())
        await self._client.update_params_for_auth(headers, [], ["BearerToken"], "", verb, None)
        url = self._client.configuration.host + path + (f"?{urlencode(query)}" if query else "")
        code = 0
        try:
            async with self._slots if slots else contextlib.nullcontext():
                answer = await self._client.rest_client.request(
                    _METHODS[verb], url, headers=headers, body=body, _request_timeout=TIMEOUT_SECONDS
                )
                content, code = await answer.read(), answer.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            told = str(error) or type(error).__name__
            raise UnavailableError(f"{verb} {what}: {told}") from error
        finally:
            self.on_answer(verb, resource, code)
        if code >= 300:
            raise _error(code, content, f"{verb} {what}")
        found: Json = json.loads(content)
        return found


_METHODS: Final = {
    "get": "GET",
    "list": "GET",
    "create": "POST",
    "apply": "PATCH",
    "patch": "PATCH",
    "update": "PUT",
    "delete": "DELETE",
}


def _headers(verb: str, rest: tuple[str, ...]) -> dict[str, str]:
    if verb == "apply":
        accept = "application/json" if "status" in rest else _METADATA_ONLY
        # With the parameter, the client leaves our own encoding alone.
        return {"Content-Type": "application/apply-patch+yaml; charset=utf-8", "Accept": accept}
    if verb == "patch":
        return {"Content-Type": "application/json-patch+json", "Accept": _METADATA_ONLY}
    if verb == "list":
        return {"Accept": _METADATA_LIST}
    return {"Accept": _METADATA_ONLY if verb in ("create", "delete") else "application/json"}


def yaml_of(body: Json) -> bytes:
    """JSON that is YAML as well, which JSON in ASCII is not: YAML has no surrogates, by which that writes an emoji.

    Last words of processes have such; without this the status would be refused until they are others.
    """
    return _NOT_IN_YAML.sub(_escaped, json.dumps(body, ensure_ascii=False)).encode()


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return "\\ufffd" if 0xD800 <= code <= 0xDFFF else f"\\u{code:04x}"


_NOT_IN_YAML: Final = re.compile("[^\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
"""Characters that a YAML document may hold as escapes only, those that it takes for line breaks (U+2028, U+2029), and
halves of pairs, which it cannot hold."""


def _error(code: int, content: bytes, what: str) -> ClusterError:
    try:
        message = str(json.loads(content)["message"])
    except (ValueError, KeyError, TypeError):
        message = content.decode(errors="replace")[:200]
    if code in (404, 410):
        return MissingError(f"{what}: {message}")
    if code == 409:
        return ConflictError(f"{what}: {message}")
    if code in (400, 422):
        return InvalidError(message)
    if code in (401, 403, 405, 413, 415):
        return RefusedError(message)
    return UnavailableError(f"{what}: {code} {message}")


def _place(manifest: Json) -> tuple[str, str]:
    meta = manifest["metadata"]
    return meta["namespace"], meta["name"]


def _strict(manifest: Json) -> Mapping[str, str]:
    """Unknown fields are refused; but of gangs and queues, where an older version may serve fewer."""
    return {} if kind_of(manifest) in apis.RESOURCES else _STRICT
