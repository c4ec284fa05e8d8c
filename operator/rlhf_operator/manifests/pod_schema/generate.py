"""Writes schema.json, the pod template's part of an API server's OpenAPI, in a small form (`make pod-schema`).

A type has its required fields, and a mapping of fields to type expressions: `string`, `[Container]` for a list,
`{string}` for a mapping with any names, `A|B` for one of these words.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

Json = dict[str, Any]

PATH: Final = Path(__file__).parent / "schema.json"
ROOT: Final = "PodTemplateSpec"
_SCALARS: Final[Mapping[tuple[str, str], str]] = {
    ("string", ""): "string",
    ("string", "date-time"): "time",
    ("integer", "int32"): "int32",
    ("integer", "int64"): "int64",
    ("boolean", ""): "boolean",
}
_SPECIAL: Final[Mapping[str, str]] = {"Quantity": "quantity", "IntOrString": "int-or-string", "Time": "time"}
"""Types that get a type expression of their own."""
_OPAQUE: Final = frozenset({"FieldsV1"})
"""Objects whose schema has no fields."""


def generate(openapi: Mapping[str, Any], version: str) -> Json:
    """Return schema.json of an OpenAPI document (`/openapi/v3/api/v1`); `version` is that of the API server, v1.36."""
    schemas = {name.rpartition(".")[2]: node for name, node in openapi["components"]["schemas"].items()}
    types: Json = {}
    waiting = [ROOT]
    while waiting:
        name = waiting.pop()
        if name in types:
            continue
        node = schemas[name]
        fields = {field: _expression(child) for field, child in sorted(node.get("properties", {}).items())}
        types[name] = {"required": sorted(node.get("required", [])), "fields": fields}
        named = {field.strip("[]{}") for field in fields.values()}
        waiting += sorted(item for item in named if item in schemas)
    return {"kubernetes": version, "types": dict(sorted(types.items()))}


def text(schema: Json) -> str:
    """Return the text of the checked-in file: one field per line, so that a newer Kubernetes shows as a diff."""
    return json.dumps(schema, indent=1) + "\n"


def _expression(node: Mapping[str, Any]) -> str:
    if "allOf" in node:
        (node,) = node["allOf"]
    if "$ref" in node:
        name = str(node["$ref"]).rpartition(".")[2]
        return "{any}" if name in _OPAQUE else _SPECIAL.get(name, name)
    if node.get("type") == "array":
        return f"[{_expression(node['items'])}]"
    if node.get("type") == "object":
        return f"{{{_expression(node['additionalProperties'])}}}"
    if "enum" in node:
        return "|".join(node["enum"])
    return _SCALARS[node["type"], node.get("format", "")]


def main() -> None:
    """Read the OpenAPI document from stdin and the version from the argument; write schema.json."""
    PATH.write_text(text(generate(json.load(sys.stdin), sys.argv[1])), encoding="utf-8")


if __name__ == "__main__":
    main()
