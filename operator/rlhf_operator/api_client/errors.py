"""The errors of requests to the API server, one class for each reaction of a caller.

A refusal's text is the message alone, because users read it in conditions.
"""

from typing import Any

from rlhf_common.json_document import parse_json

MAX_BODY_SHOWN = 300
"""Most characters shown of an answer without a message of its own."""


class ApiError(Exception):
    """A request to the API server failed, or got no answer."""

    def __init__(
        self, message: str, *, request: str = "", code: int = 0, reason: str = "", details: dict[str, Any] | None = None
    ) -> None:
        """`message` is the API server's, or says what else went wrong."""
        super().__init__(message)
        self.request = request
        """Verb, resource and name; empty if the error does not belong to one request."""
        self.code = code
        self.reason = reason
        self.details = details or {}
        """`details` of the Status; empty if there are none."""
        self.is_status = False
        """Whether the answer was a JSON object with a message, as a Status of the API server is."""


class UnavailableError(ApiError):
    """The API server could not be reached, is overloaded or failed, or answered with a code that no other class has."""

    def __str__(self) -> str:
        return _qualified(self)


class MissingError(ApiError):
    """The object or the version does not exist, or the API server does not know its kind."""

    def __str__(self) -> str:
        return _qualified(self)


class ConflictError(ApiError):
    """The object already exists, or has changed or gone since it was read."""

    def __str__(self) -> str:
        return _qualified(self)


class RefusedError(ApiError):
    """A retry at once is useless: quota, rights, an invalid object, or a name in use."""


class ForbiddenError(RefusedError):
    """The caller has no permission or is not authenticated, or admission refuses the request, such as by a quota."""


class InvalidError(RefusedError):
    """The request is invalid; the API server would refuse it again."""


def error_of(code: int, content: bytes, request: str) -> ApiError:
    """Return the error for an answer with this HTTP code; `content` is its body."""
    status = _status(content)
    message = str(status.get("message") or content.decode(errors="replace").strip()[:MAX_BODY_SHOWN])
    kind = _KINDS.get(code, UnavailableError)
    details = status.get("details")
    error = kind(
        f"{code} {message}" if kind is UnavailableError else message,
        request=request,
        code=code,
        reason=str(status.get("reason") or ""),
        details=details if isinstance(details, dict) else {},
    )
    error.is_status = bool(status)
    return error


_KINDS: dict[int, type[ApiError]] = {
    400: InvalidError,
    401: ForbiddenError,
    403: ForbiddenError,
    404: MissingError,
    405: RefusedError,
    409: ConflictError,
    410: MissingError,
    413: RefusedError,
    415: RefusedError,
    422: InvalidError,
}


def _qualified(error: ApiError) -> str:
    message = str(error.args[0])
    return f"{error.request}: {message}" if error.request else message


def _status(content: bytes) -> dict[str, Any]:
    """Return the JSON object with a message in the body of an answer; empty if there is none."""
    try:
        body = parse_json(content)
    except ValueError:
        return {}
    return body if isinstance(body, dict) and "message" in body else {}
