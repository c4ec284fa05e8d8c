"""Checks a pod template against the API server's schema: unknown or missing fields, wrong types and enum values.

A wrong type is an error. Fields and enum values that a newer Kubernetes may know have `Severity.SERVER`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any, Final

from rlhf_api.problems import SHOWN_VALUE, Problem, Severity

_SCHEMA: Final[dict[str, Any]] = json.loads(files(__package__).joinpath("schema.json").read_text(encoding="utf-8"))
_TYPES: Final[Mapping[str, Any]] = _SCHEMA["types"]
KUBERNETES: Final[str] = _SCHEMA["kubernetes"]
"""Version of the API server that the schema was generated from."""

QUANTITY: Final = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(([KMGTPE]i)|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?")
QUANTITY_MAX: Final = 64
"""Most characters of a quantity."""
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")
_LARGEST: Final[Mapping[str, int]] = {"int32": 2**31 - 1, "int64": 2**63 - 1}
_WORDS: Final[Mapping[str, str]] = {
    "string": "text",
    "boolean": "true or false",
    "int32": "a whole number",
    "int64": "a whole number",
    "int-or-string": "a whole number or text",
    "quantity": "a quantity such as 2, 500m or 1Gi",
    "time": "a time such as 2026-08-22T10:00:00Z",
}
_KEYS: Final = frozenset({"name", "mountPath", "containerPort"})
"""Required fields whose absence is an error here, because merging and look-ups of lists depend on them."""
_HOMES: Final = ("PodSpec", "Container", "PodSecurityContext", "SecurityContext", "ResourceRequirements")
"""Types whose fields are often put into the wrong type."""


def problems_of(template: object, path: str) -> list[Problem]:
    """Return the problems of a PodTemplateSpec at `path` of the manifest. It must not be nested too deeply."""
    return list(_check(template, "PodTemplateSpec", path))


def _check(value: object, kind: str, path: str) -> Iterator[Problem]:
    if kind in _TYPES:
        yield from _object(value, kind, path)
    elif kind.startswith("["):
        if not isinstance(value, list):
            hint = "" if not isinstance(value, Mapping) else ", each with '-' before it"
            yield Problem(path, value, f"must be a list{hint}, each {_named(kind[1:-1])}")
            return
        for index, item in enumerate(value):
            yield from _check(item, kind[1:-1], f"{path}[{index}]")
    elif kind.startswith("{"):
        if not isinstance(value, Mapping):
            yield Problem(path, value, f"must be a mapping of names, each {_named(kind[1:-1])}")
            return
        for name, item in value.items():
            yield from _check(item, kind[1:-1], _below(path, name))
    elif "|" in kind:
        yield from _one_of(value, kind.split("|"), path)
    elif kind != "any" and not _fits(value, kind):
        yield Problem(path, value, f"must be {_WORDS[kind]}{_hint(value, kind)}")


def _object(value: object, kind: str, path: str) -> Iterator[Problem]:
    fields = _TYPES[kind]["fields"]
    if not isinstance(value, Mapping):
        listed = ": the value is a list, remove the '-'" if isinstance(value, list) else ""
        yield Problem(path, value, f"must be {_named(kind)}{listed}")
        return
    for name in _TYPES[kind]["required"]:
        # Containers are merged with ours, so a template need not have any.
        if value.get(name) is None and (kind, name) != ("PodSpec", "containers"):
            severity = Severity.ERROR if name in _KEYS else Severity.SERVER
            yield Problem(f"{path}.{name}", None, f"is required in {_a(kind)}", severity=severity)
    for name, item in value.items():
        if name in fields:
            if item is not None:
                yield from _check(item, fields[name], f"{path}.{name}")
        elif kind == "PodTemplateSpec":
            yield Problem(_below(path, name), item, "a pod template has metadata and spec only")
        else:
            yield Problem(_below(path, name), item, _unknown(str(name), kind), severity=Severity.SERVER)


def _one_of(value: object, words: list[str], path: str) -> Iterator[Problem]:
    if not isinstance(value, str):
        yield Problem(path, value, f"must be one of {_listed(words)}")
    elif value not in words:
        near = get_close_matches(value.lower(), [word.lower() for word in words], n=1, cutoff=0.6)
        meant = next((f": did you mean {word}?" for word in words if near and word.lower() == near[0]), "")
        yield Problem(path, value, f"must be one of {_listed(words)}{meant}", severity=Severity.SERVER)


def _fits(value: object, kind: str) -> bool:
    number = isinstance(value, int) and not isinstance(value, bool)
    match kind:
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "int32" | "int64":
            return isinstance(value, int) and number and -_LARGEST[kind] - 1 <= value <= _LARGEST[kind]
        case "int-or-string":
            return number or isinstance(value, str)
        case "quantity":
            text = str(value) if number or isinstance(value, float) else value
            return isinstance(text, str) and len(text) <= QUANTITY_MAX and QUANTITY.fullmatch(text) is not None
        case _:
            return isinstance(value, str) and _TIME.fullmatch(value) is not None


def _hint(value: object, kind: str) -> str:
    if kind == "string" and isinstance(value, bool | int | float):
        return f': write it in quotes, "{str(value).lower() if isinstance(value, bool) else str(value)[:40]}"'
    if kind in ("int32", "int64", "boolean") and isinstance(value, str):
        right = value.lower() in ("true", "false") if kind == "boolean" else value.lstrip("-").isdecimal()
        return ": remove the quotes" if right else ""
    if kind == "quantity" and isinstance(value, str) and value.upper().endswith("B"):
        return f": leave the B out, {value[:-1]}" if QUANTITY.fullmatch(value[:-1]) else ""
    return ""


def _unknown(name: str, kind: str) -> str:
    message = f"unknown field of {_a(kind)} in Kubernetes {KUBERNETES}"
    lower = {field.lower(): field for field in _TYPES[kind]["fields"]}
    near = get_close_matches(name.replace("_", "").replace("-", "").lower(), lower, n=1, cutoff=0.7)
    if near:
        return f"{message}: did you mean {lower[near[0]]}?"
    home = next((item for item in _HOMES if name in _TYPES[item]["fields"]), None)
    if home is not None:
        return f"{message}: {name} is a field of {_a(home)}"
    return f"{message}; an API server that is newer may know it, and decides"


def _below(path: str, name: object) -> str:
    """Return the path of a field, shortened: an unknown name may have any length."""
    text = str(name)
    return f"{path}.{text if len(text) <= SHOWN_VALUE else text[: SHOWN_VALUE - 3] + '...'}"


@cache
def _named(kind: str) -> str:
    if kind in _TYPES:
        fields = [*_TYPES[kind]["required"]] or list(_TYPES[kind]["fields"])
        return f"a mapping with {', '.join(fields[:6])}{', ...' if len(fields) > 6 else ''}"
    if kind.startswith("["):
        return "a list"
    if kind.startswith("{"):
        return "a mapping"
    return f"one of {_listed(kind.split('|'))}" if "|" in kind else _WORDS[kind]


def _a(kind: str) -> str:
    return f"{'an' if kind[0] in 'AEIO' else 'a'} {kind}"


def _listed(words: list[str]) -> str:
    named = [word for word in words if word]
    return ", ".join(named[:8]) + (", ..." if len(named) > 8 else "")
