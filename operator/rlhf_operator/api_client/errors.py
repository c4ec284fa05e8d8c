"""What can go wrong with a request to the API server: one set of errors, named for what a caller can do about it.

Each error carries the request it is about, the HTTP code (0: there was no answer) and the API server's reason, such as
`AlreadyExists`. The text of a refusal is the API server's own, as it goes into conditions and to users; that of any
other error names the verb and the object first.
"""

import json
from typing import Any

MAX_BODY_SHOWN = 300
"""Characters of an answer that is no Status."""


class ApiError(Exception):
    """The API server did not do what was asked."""

    def __init__(
        self, message: str, *, request: str = "", code: int = 0, reason: str = "", details: dict[str, Any] | None = None
    ) -> None:
        """`message` is the API server's, or says why there was no answer."""
        super().__init__(message)
        self.request = request
        """Verb, resource and name; empty when the error is not of one request."""
        self.code = code
        self.reason = reason
        self.details = details or {}
        """`details` of the Status; empty when the answer was none."""
        self.is_status = False
        """The API server itself said so, rather than a process behind it."""


class UnavailableError(ApiError):
    """The API server could not be reached, or has no time: try again later."""

    def __str__(self) -> str:
        return _qualified(self)


class MissingError(ApiError):
    """The object does not exist (any more), or the API server does not know its kind."""

    def __str__(self) -> str:
        return _qualified(self)


class ConflictError(ApiError):
    """The object exists already, or is another than the one that was seen."""

    def __str__(self) -> str:
        return _qualified(self)


class RefusedError(ApiError):
    """Somebody has to act first: quota, rights, an invalid object."""


class ForbiddenError(RefusedError):
    """We may not do it, or are not known."""


class InvalidError(RefusedError):
    """What was sent is wrong in itself: sent again, it would be refused again."""


def error_of(code: int, content: bytes, request: str) -> ApiError:
    """Return the error that an answer with this HTTP code means; `content` is its body."""
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
    """Return the Status that an answer holds; empty when it holds none."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) and "message" in body else {}
