"""The errors of a verb: a message and the exit code of the command."""

import re
from typing import TYPE_CHECKING, Final

from rlhf_common import names
from rlhf_common.names import ExitCode
from rlhf_operator.api_client.errors import ApiError, ForbiddenError, MissingError, UnavailableError

if TYPE_CHECKING:  # errors of a local run are explained on machines without the Kubernetes client
    from rlhf_operator.api_client.connection import Connection
    from rlhf_operator.api_client.transport import ApiRequest

TIMED_OUT: Final = 124
"""Exit code of a `wait` that timed out, the same as timeout(1)."""
_USER: Final = re.compile(r'User "([^"]*)"')


class VerbError(Exception):
    """The command stopped; the message says why."""

    def __init__(self, message: str, exit_code: int = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.exit_code = int(exit_code)


def explained(error: ApiError, request: "ApiRequest", connection: "Connection") -> ApiError | VerbError:
    """Return an error of the same class whose text names a remedy where one is known; a VerbError where the API server
    does not know RLHFJobs.
    """
    message = str(error.args[0])
    if isinstance(error, UnavailableError):
        answered = f"the API server could not answer ({request.verb} {_shown(request)}): {message}"
        text = answered if error.code else _unreachable(message, connection)
    elif error.code == 401:
        context = connection.context or "this pod"
        text = f"the API server does not accept the credentials of {context}: they may have expired; log in again"
    elif isinstance(error, ForbiddenError):
        text = _forbidden(message, request) if error.is_status or request.subresource != "proxy" else message
    elif isinstance(error, MissingError):
        if request.resource.plural == names.PLURAL and not error.details.get("name"):
            return VerbError(_not_installed(connection))
        text = f"{_shown(request)} is not there: {message}"
    else:
        text = message
    return type(error)(text, code=error.code, reason=error.reason, details=error.details)


def _unreachable(why: str, connection: "Connection") -> str:
    server = connection.configuration.host
    context = f" (context {connection.context})" if connection.context else ""
    if "CERTIFICATE_VERIFY_FAILED" in why or "certificate verify failed" in why:
        remedy = "its certificate is not that of the kubeconfig's authority: fetch the kubeconfig anew"
    else:
        remedy = "check that the cluster is up and this machine's way to it, or name another cluster by --context"
    return f"the API server {server}{context} cannot be reached: {why}; {remedy}"


def _forbidden(message: str, request: "ApiRequest") -> str:
    match = _USER.search(message)
    user = f"user {match.group(1)}" if match else "you"
    group = f".{names.GROUP}" if request.resource.plural == names.PLURAL else ""
    role = "edit" if request.verb == "patch" or request.subresource == "proxy" else "view"
    scope = f"rolebinding in {request.namespace}" if request.namespace else "clusterrolebinding"
    subresource = f"/{request.subresource}" if request.subresource else ""
    return (
        f"{user} may not {request.verb} {request.resource.plural}{group}{subresource} {_where(request)}:"
        f" ask for the ClusterRole {role} by a {scope}, or for a Role with this verb"
    )


def _not_installed(connection: "Connection") -> str:
    context = f"context {connection.context}" if connection.context else "this cluster"
    return (
        f"{context} does not know {names.KIND} ({names.API_VERSION}): install the operator there"
        " (helm install rlhf charts/rlhf-operator --namespace rlhf-system --create-namespace),"
        " or name another --context"
    )


def _shown(request: "ApiRequest") -> str:
    """Return the resource as a Role names it, with the object's name and namespace."""
    resource = "/".join(part for part in (request.resource.plural, request.subresource) if part)
    return " ".join(part for part in (resource, request.name, _where(request)) if part)


def _where(request: "ApiRequest") -> str:
    return f"in namespace {request.namespace}" if request.namespace else "in all namespaces"
