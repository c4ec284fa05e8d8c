"""Parses untrusted input: objects of the cluster, logs of processes, replies of coordinators. Rule: pure."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final

from rlhf_common.json_document import parse_json
from rlhf_common.nesting import MAX_DEPTH, too_deep

Json = Mapping[str, Any]

NAME_MAX: Final = 253
"""Maximum characters of the name of an object."""
LISTED_MAX: Final = 256
"""Most entries of a list of objects."""
NUMBER_MAX: Final = 2**63 - 1
"""Largest integer in the API server's objects."""
PARSER_LEVELS: Final = 11_000
"""Recursion limit for the parser of the API server's answers, whose objects may have 10,000 levels."""
FINALIZERS_KEPT: Final = 8
"""Most finalizers of an object that `finalizers_of` returns."""
SHOWN_MAX: Final = 60
"""Maximum characters of a wrong value that are shown."""
_WHOLE: Final = re.compile(r"[0-9]{1,18}")
"""ASCII digits: Python also accepts digits of other scripts, and raises for many thousands of them."""
_NEVER: Final = "1970-01-01T00:00:00Z"
_FIRST_YEAR: Final = 1970
_LAST_YEAR: Final = 2999
"""Years of a time are above the first and up to the last."""


class UnreadableError(ValueError):
    """A value is not of the expected form; the message is a sentence."""


def wrong(field: str, value: Any, wanted: str) -> UnreadableError:
    """Return the error that a field has an unexpected value."""
    return UnreadableError(f"{field} is {shown(value)}, must be {wanted}")


def bounded(body: Any) -> None:
    """Raise UnreadableError if a body is nested too deeply for code that recurses."""
    if place := too_deep(body):
        raise UnreadableError(f"{place[:NAME_MAX]}: it is nested more than {MAX_DEPTH} levels deep")


@dataclass(frozen=True, slots=True)
class UnreadableObject:
    """An object that cannot be read; its identity is empty if that cannot be read either."""

    name: str
    uid: str
    version: int = field(compare=False)
    """resourceVersion; ignored in comparisons."""
    owner: str
    """uid of the object that controls it; empty if there is none."""
    why: str
    going: bool = False
    """Whether its deletion is requested."""


@dataclass(frozen=True, slots=True)
class ObjectIdentity:
    """Identity of an object."""

    name: str
    uid: str
    version: int
    owner: str


def identity_of(meta: Any) -> ObjectIdentity:
    """Return the identity of an object from its `metadata`. Raises UnreadableError."""
    metadata = mapping(meta, "metadata")
    return ObjectIdentity(
        text(metadata.get("name"), "metadata.name", NAME_MAX, empty=False),
        text(metadata.get("uid"), "metadata.uid", NAME_MAX, empty=False),
        whole(metadata.get("resourceVersion"), "metadata.resourceVersion"),
        owner_of(metadata),
    )


def owner_of(meta: Json) -> str:
    """Return the uid of the object's controller in its ownerReferences; empty if there is none.

    Labels do not count, because anybody may set them.
    """
    owners = meta.get("ownerReferences")
    if type(owners) is list:
        for owner in owners:
            if type(owner) is dict and owner.get("controller") is True:
                uid = owner.get("uid")
                return uid if type(uid) is str else ""
    return ""


@dataclass(frozen=True, slots=True)
class DeletedObject:
    """An object under deletion that finalizers delay."""

    kind: str
    name: str
    deleted: datetime
    """Time of the deletion request."""
    finalizers: tuple[str, ...]


def finalizers_of(meta: Json) -> tuple[str, ...]:
    """Return the first finalizers of an object, from its `metadata`. Raises UnreadableError."""
    values = meta.get("finalizers") or ()
    if not isinstance(values, list | tuple):
        raise wrong("metadata.finalizers", values, "a list of texts")
    return tuple(text(value, "metadata.finalizers", NAME_MAX) for value in values[:FINALIZERS_KEPT])


def describe_finalizers(finalizers: Sequence[str]) -> str:
    """Return that finalizers of others delay the deletion of an object, with a remedy."""
    names = ", ".join(finalizers)
    noun, pronoun = ("finalizer", "it") if len(finalizers) == 1 else ("finalizers", "them")
    return (
        f"{noun} {names} of another controller keeps a deleted object; see that the controller that set {pronoun} "
        f"runs, or remove {pronoun} from metadata.finalizers with `kubectl edit`"
    )


def text(value: Any, field: str, most: int, *, empty: bool = True) -> str:
    """Return the first `most` characters of a text; with `empty`, None is an empty text.

    Raises UnreadableError for another type, and for an empty text without `empty`.
    """
    if value is None and empty:
        return ""
    if type(value) is not str or not (value or empty):
        raise wrong(field, value, "a text" if empty else "a text that is not empty")
    return value[:most] if value.isascii() else clean(value[:most])


def clean(value: str) -> str:
    """Replace unpaired surrogates, which UTF-8 cannot encode, by `?`."""
    return value.encode(errors="replace").decode()


@lru_cache(maxsize=4096)
def _digits(value: str) -> int:
    """Return the number of 1 to 18 digits in a text, -1 if it is none."""
    return int(value) if _WHOLE.fullmatch(value) else -1


def whole(value: Any, field: str, most: int = NUMBER_MAX) -> int:
    """Return a number from 0 to `most`, or from its digits; 0 for None and an empty text. Raises UnreadableError."""
    if value is None or value == "":
        return 0
    kind = type(value)
    number = _digits(value) if kind is str and len(value) < 20 else value if kind is int else -1
    if not 0 <= number <= most:
        raise wrong(field, value, f"a whole number from 0 to {most}")
    return int(number)


def mapping(value: Any, field: str) -> Json:
    """Return an object; an empty one for None. Raises UnreadableError."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong(field, value, "an object")
    return value


def listed(value: Any, field: str, most: int = LISTED_MAX) -> Sequence[Json]:
    """Return a list of objects; an empty one for None. Raises UnreadableError, also for more than `most`."""
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > most:
        raise wrong(field, value, f"a list of at most {most} objects")
    for number, entry in enumerate(value):
        if not isinstance(entry, dict):
            raise wrong(f"{field}[{number}]", entry, "an object")
    return value


def moment(value: Any, field: str) -> datetime | None:
    """Return a time of the API server, RFC 3339, in UTC; None if there is none. Raises UnreadableError.

    The start of 1970 counts as none.
    """
    if not value or value == _NEVER:
        return None
    try:
        time = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        time = None
    if time is None or time.tzinfo is None or not _FIRST_YEAR < time.year <= _LAST_YEAR:
        raise wrong(field, value, "a time such as 2026-08-22T10:00:00Z")
    return time if time.tzinfo is UTC else time.astimezone(UTC)


def loads(line: str) -> Any:
    """Return a JSON document; None if it is invalid, or has too many levels or digits."""
    try:
        return parse_json(line)
    except ValueError:
        return None


def shown(value: Any) -> str:
    """Return a wrong value, shortened."""
    if isinstance(value, str):
        quoted = json.dumps(clean(value[:SHOWN_MAX]), ensure_ascii=False)
        return quoted if len(value) <= SHOWN_MAX else f"{quoted[:-1]}..."
    if isinstance(value, bool | None):
        return json.dumps(value)
    if isinstance(value, dict | list):
        kind = "an object" if isinstance(value, dict) else "a list"
        return f"{kind} of {len(value)}"
    if isinstance(value, int):
        return str(value) if abs(value) <= 10**18 else "a number of many digits"
    return str(value)[:SHOWN_MAX] if isinstance(value, float) else f"a {type(value).__name__}"
