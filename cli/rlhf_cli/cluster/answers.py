"""What the API server's refusals mean, in sentences with a remedy. Pure."""

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from rlhf_api import names
from rlhf_cli.cluster.connection import Connection
from rlhf_cli.cluster.errors import (
    AbsentError,
    ForbiddenError,
    RefusedError,
    UnreachableError,
    VerbError,
)

_USER: Final = re.compile(r'User "([^"]*)"')


@dataclass(frozen=True)
class Asked:
    """What a request was about."""

    resource: str
    namespace: str | None = None
    name: str = ""
    subresource: str = ""
    rest: str = ""
    """Path below the subresource."""

    def path(self, prefix: str) -> str:
        """Of the request."""
        place = f"{prefix}/namespaces/{self.namespace}" if self.namespace else prefix
        return "/".join([place, *filter(None, (self.resource, self.name, self.subresource))]) + self.rest

    @property
    def right(self) -> str:
        """The resource as a Role names it."""
        return f"{self.resource}/{self.subresource}" if self.subresource else self.resource

    @property
    def where(self) -> str:
        """In words."""
        return f"in namespace {self.namespace}" if self.namespace else "in all namespaces"

    def __str__(self) -> str:
        return f"{self.right} {self.name} {self.where}".replace("  ", " ")


def unreachable(connection: Connection, error: BaseException) -> UnreachableError:
    """No answer at all."""
    server = connection.configuration.host
    context = f" (context {connection.context})" if connection.context else ""
    told = " ".join(str(error).split()) or ("no answer in time" if isinstance(error, TimeoutError) else "no answer")
    if "CERTIFICATE_VERIFY_FAILED" in told or "certificate verify failed" in told:
        remedy = "its certificate is not that of the kubeconfig's authority: fetch the kubeconfig anew"
    else:
        remedy = "check that the cluster is up and this machine's way to it, or name another cluster by --context"
    return UnreachableError(f"the API server {server}{context} cannot be reached: {told}; {remedy}")


def problem(code: int, content: bytes, verb: str, asked: Asked, connection: Connection) -> VerbError:
    """An answer that is not success."""
    status = _status(content)
    message = str(status.get("message") or content.decode(errors="replace").strip()[:300])
    if code == 401:
        context = connection.context or "this pod"
        told = f"the API server does not accept the credentials of {context}: they may have expired; log in again"
        return ForbiddenError(told)
    if code == 403 and asked.subresource != "proxy":
        return ForbiddenError(_forbidden(message, verb, asked))
    if code == 403:
        return ForbiddenError(_forbidden(message, verb, asked) if status else message)
    if code == 404:
        if asked.resource == names.PLURAL and not (status.get("details") or {}).get("name"):
            return VerbError(_not_installed(connection))
        return AbsentError(f"{asked} is not there: {message}")
    if code in (429, 500, 502, 503, 504):
        return UnreachableError(f"the API server could not answer ({verb} {asked}): {code} {message}")
    return RefusedError(message)


def _forbidden(message: str, verb: str, asked: Asked) -> str:
    found = _USER.search(message)
    user = f"user {found.group(1)}" if found else "you"
    group = f".{names.GROUP}" if asked.resource == names.PLURAL else ""
    role = "edit" if verb == "patch" or asked.subresource == "proxy" else "view"
    scope = f"rolebinding in {asked.namespace}" if asked.namespace else "clusterrolebinding"
    return (
        f"{user} may not {verb} {asked.resource}{group}{'/' + asked.subresource if asked.subresource else ''}"
        f" {asked.where}: ask for the ClusterRole {role} by a {scope}, or for a Role with this verb"
    )


def _not_installed(connection: Connection) -> str:
    context = f"context {connection.context}" if connection.context else "this cluster"
    return (
        f"{context} does not know {names.KIND} ({names.API_VERSION}): install the operator there"
        " (helm install rlhf charts/rlhf-operator --namespace rlhf-system --create-namespace),"
        " or name another --context"
    )


def _status(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) and found.get("kind") == "Status" else {}
