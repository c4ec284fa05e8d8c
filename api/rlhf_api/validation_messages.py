"""Turns errors of pydantic into messages for users: field path, actual value, correct values.

Correct values come from the structural schema.
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from typing import Any, Final

from pydantic_core import ErrorDetails

from rlhf_api import user_patterns
from rlhf_api.problems import Problem
from rlhf_api.structural_schema import Schema, fields, job_schema, schema_at
from rlhf_api.yaml_document import Document

_NO_LIMIT: Final = 2**31 - 1
"""Smallest upper bound that counts as technical and is not mentioned."""
_MODE_REMEDIES: Final = {"off": "Disabled", "on": "Enabled", "false": "Disabled", "true": "Enabled"}
"""Common lower-case words for a mode -> the mode."""


def problem_of_error(error: ErrorDetails, document: Document) -> Problem:
    """Return one of pydantic's errors as a problem."""
    path = _path(error["loc"])
    line = document.line_of(path)
    if error["type"] == "extra_forbidden":
        return Problem(path, error["input"], _unknown(path), line)
    if error["type"] == user_patterns.PATTERN_ERROR:
        return Problem(path, error["input"], error["msg"], line)
    node = schema_at(path) or {}
    if error["type"] == "missing":
        expected = (
            node["description"].rstrip(".")
            if "description" in node and "properties" not in node
            else expected_value(node)
        )
        return Problem(path, None, f"is required: {expected}", line)
    return Problem(path, error["input"], f"must be {expected_value(node)}{_hint(error['input'], node)}", line)


def expected_value(node: Schema) -> str:
    """Return a description of valid values, such as `a whole number from 1 to 64`."""
    if "enum" in node:
        allowed = [str(value) for value in node["enum"]]
        return allowed[0] if len(allowed) == 1 else f"one of {', '.join(allowed)}"
    match node.get("type"):
        case "integer":
            return "a whole number" + _range(node)
        case "number":
            return "a number" + _range(node)
        case "boolean":
            return "true or false"
        case "string" if "pattern" in node:
            example = f", such as {node['example']}" if "example" in node else ""
            return f"text that matches {node['pattern']}{example}"
        case "string":
            return f"text of {node.get('minLength', 0)} to {node.get('maxLength', 'any number of')} characters"
        case "array":
            return f"a list of at most {node['maxItems']} items, each {expected_value(node['items'])}"
        case _ if "properties" in node:
            return f"a mapping with {_listed(node['properties'])}"
        case _:
            return "a mapping"


def _range(node: Schema) -> str:
    low, high = node.get("minimum"), node.get("maximum")
    if high is not None and high >= _NO_LIMIT:
        high = None
    open_low, open_high = node.get("exclusiveMinimum", False), node.get("exclusiveMaximum", False)
    if low is not None and high is not None and not open_low and not open_high:
        return f" from {low} to {high}"
    bounds = []
    if low is not None:
        bounds.append(f"above {low}" if open_low else f"of at least {low}")
    if high is not None:
        bounds.append(f"below {high}" if open_high else f"at most {high}")
    return f" {' and '.join(bounds)}" if bounds else ""


def _hint(value: Any, node: Schema) -> str:
    """Return a hint at a valid value, or at the likely typing error; empty if there is none."""
    kind = node.get("type")
    if "enum" in node:
        return _enum_hint(value, [str(allowed) for allowed in node["enum"]])
    if kind == "string" and isinstance(value, str) and (near := _nearest(value, _words_of(node))):
        return f": did you mean {near}?"
    if kind == "string" and isinstance(value, bool | int | float):
        return f': write it in quotes, "{str(value).lower() if isinstance(value, bool) else value}"'
    if kind in ("integer", "number") and isinstance(value, str):
        return _quoted_number_hint(value)
    if kind == "integer" and isinstance(value, int | float) and not isinstance(value, bool):
        if value != value or value in (float("inf"), float("-inf")):
            return ""
        clamped = min(max(round(value), node.get("minimum", round(value))), node.get("maximum", round(value)))
        return f": use {clamped}"
    if kind == "boolean" and isinstance(value, str):
        return ": remove the quotes" if value.lower() in ("true", "false") else ""
    if kind == "array":
        return ": write a list, [a, b]" if not isinstance(value, list) else ""
    return ""


def _words_of(node: Schema) -> list[str]:
    """Return words that a text field accepts: its example, and the alternatives at the start of its pattern."""
    alternatives = re.match(r"\^\(((?:\w+\|)+)", node.get("pattern", ""))
    examples = [node["example"]] if "example" in node else []
    return examples + (alternatives[1].strip("|").split("|") if alternatives else [])


def _quoted_number_hint(value: str) -> str:
    try:
        float(value)
    except ValueError:
        return ""
    return f": remove the quotes, {value}"


def _enum_hint(value: Any, allowed: list[str]) -> str:
    if renamed := _MODE_REMEDIES.get(str(value).lower()):
        return f": write {renamed}" if renamed in allowed else ""
    if isinstance(value, str):
        near = _nearest(value, allowed)
        if near:
            return f": did you mean {near}?"
    return ""


def _unknown(path: str) -> str:
    """Return the message about a field that does not exist."""
    parent, _, name = path.rpartition(".")
    fields = list((schema_at(parent) or {}).get("properties", {})) if parent else list(job_schema()["properties"])
    near = _nearest(name, fields)
    if near:
        return f"unknown field: did you mean {near}?"
    elsewhere = _elsewhere().get(_plain(name), ())
    if elsewhere:
        return f"unknown field here: did you mean {' or '.join(elsewhere[:3])}?"
    return f"unknown field: {parent or 'an RLHFJob'} has {_listed(fields)}"


@cache
def _elsewhere() -> dict[str, tuple[str, ...]]:
    """Return plain name -> the paths below spec of the fields with that name."""
    paths: dict[str, tuple[str, ...]] = {}
    for path, _ in fields(job_schema()["properties"]["spec"], "spec"):
        name = _plain(path.rpartition(".")[2])
        paths[name] = (*paths.get(name, ()), path)
    return paths


def _nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the most similar known word, or None. batch_size, BatchSize and batchsize all match batchSize."""
    by_plain = {_plain(word): word for word in candidates}
    near = get_close_matches(_plain(name), by_plain, n=1, cutoff=0.7)
    return by_plain[near[0]] if near else None


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
