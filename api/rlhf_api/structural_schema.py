"""The manifest's structural schema: the pydantic models in the form that Kubernetes accepts.

It has no $ref, no anyOf and no null, and inline defaults and descriptions.
"""

import copy
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Final, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from rlhf_api.job import RLHFJob
from rlhf_api.job.status import RLHFJobStatus

Schema = dict[str, Any]

_KEPT: Final = (
    "description", "type", "format", "enum", "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum",
    "minLength", "maxLength", "pattern", "minItems", "maxItems", "default", "required", "properties", "items",
    "example", "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-preserve-unknown-fields",
)  # fmt: skip
"""Keywords to copy, in output order."""

INT32_MAX: Final = 2**31 - 1


@cache
def job_schema() -> Schema:
    """Return the structural schema of the whole RLHFJob object. Callers must not change it."""
    schema = _schema_of(RLHFJob)
    properties = schema["properties"]
    name = {"type": "string", "description": "Name of the job; every host name is derived from it.", "maxLength": 253}
    properties["metadata"] = {
        "description": properties["metadata"]["description"],
        "type": "object",
        "properties": {"name": name},
    }
    properties["status"] = _schema_of(RLHFJobStatus)
    return schema


def schema_at(path: str) -> Schema | None:
    """Return the node of a field path such as `spec.rollout.stop[0]`; None if the manifest has no such field."""
    node: Schema | None = job_schema()
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        if node is not None:
            node = node.get("items") if index else node.get("properties", {}).get(name)
    return node


def fields(node: Schema, path: str) -> Iterator[tuple[str, Schema]]:
    """Yield every field below a node as (path, schema), parents first, in the order of the models.

    Fields of the items of lists are left out.
    """
    for name, child in node.get("properties", {}).items():
        below = f"{path}.{name}" if path else name
        yield below, child
        yield from fields(child, below)


def without_nulls(value: Any) -> Any:
    """Return a copy without null members of mappings; the API server prunes null fields that are not nullable, as all
    of the schema are."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def pruned(value: Any, schema: Mapping[str, Any]) -> Any:
    """Return a copy without fields that the schema lacks, as an API server with this definition would store it."""
    if isinstance(value, list) and "items" in schema:
        return [pruned(item, schema["items"]) for item in value]
    if not isinstance(value, dict) or "properties" not in schema:
        return value
    return {
        name: pruned(item, schema["properties"][name]) for name, item in value.items() if name in schema["properties"]
    }


def with_defaults(value: Any, schema: Schema) -> Any:
    """Return a copy with the defaults of absent fields, which the API server also fills in before it checks rules."""
    if isinstance(value, list) and "items" in schema:
        return [with_defaults(item, schema["items"]) for item in value]
    if not isinstance(value, dict):
        return value
    filled = dict(value)
    for name, child in schema.get("properties", {}).items():
        if name not in filled and "default" in child:
            filled[name] = copy.deepcopy(child["default"])
        if name in filled:
            filled[name] = with_defaults(filled[name], child)
    return filled


def _schema_of(model: type[BaseModel]) -> Schema:
    raw = model.model_json_schema(by_alias=True, mode="validation")
    schema = _structural(raw, raw.get("$defs", {}))
    _add_factory_defaults(model, schema)
    return schema


def _structural(node: Schema, definitions: dict[str, Schema]) -> Schema:
    """Return one node in structural form; a field's own description and default override those of its type."""
    node = dict(node)
    while True:
        if "$ref" in node:
            target = definitions[node.pop("$ref").rpartition("/")[2]]
        elif "anyOf" in node:
            (target,) = (option for option in node.pop("anyOf") if option.get("type") != "null")
        else:
            break
        node = {**target, **node}
    if "const" in node:
        node["enum"] = [node["const"]]
    if "examples" in node:
        node["example"] = node["examples"][0]
    if "properties" in node:
        node["properties"] = {name: _structural(child, definitions) for name, child in node["properties"].items()}
    elif node.get("type") == "object":
        node["x-kubernetes-preserve-unknown-fields"] = True
    if "items" in node:
        node["items"] = _structural(node["items"], definitions)
        node.setdefault("x-kubernetes-list-type", "atomic")
    if node.get("default", ...) is None:
        del node["default"]
    _rewrite_bounds(node)
    if "description" in node:
        node["description"] = " ".join(node["description"].split())
    return {key: node[key] for key in _KEPT if key in node}


def _rewrite_bounds(node: Schema) -> None:
    """Rewrite exclusive bounds as flags, as in OpenAPI v3; give an integer inclusive bounds and its format."""
    whole = node.get("type") == "integer"
    for bound, step in (("Minimum", 1), ("Maximum", -1)):
        exclusive = node.pop(f"exclusive{bound}", None)
        if exclusive is None:
            continue
        node[bound.lower()] = exclusive + step if whole else exclusive
        if not whole:
            node[f"exclusive{bound}"] = True
    if whole:
        node["format"] = "int32" if node.get("maximum", INT32_MAX + 1) <= INT32_MAX else "int64"


def _add_factory_defaults(model: type[BaseModel], schema: Schema) -> None:
    """Add defaults from factories, which pydantic's schema lacks: for a model an empty object, whose fields have their
    own."""
    for field in model.model_fields.values():
        assert field.alias is not None
        child = schema["properties"][field.alias]
        if field.default_factory is not None:
            default = field.get_default(call_default_factory=True, validated_data={})
            assert default is not PydanticUndefined
            child["default"] = {} if isinstance(default, BaseModel) else json.loads(json.dumps(default))
        inner = model_in(field.annotation)
        if inner is not None and "properties" in child:
            _add_factory_defaults(inner, child)
        item = _item_model(field.annotation)
        if item is not None:
            _add_factory_defaults(item, child["items"])


def _item_model(annotation: Any) -> type[BaseModel] | None:
    """Return the model of the items of a field of type `list[Model]` or `list[Model] | None`; None for other types."""
    options = (annotation, *get_args(annotation))
    items = (get_args(option)[0] for option in map(_plain, options) if get_origin(option) is list)
    return next((item for item in items if isinstance(item, type) and issubclass(item, BaseModel)), None)


def _plain(annotation: Any) -> Any:
    """Return the type of `Annotated[type, ...]`."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model of a field of type `Model` or `Model | None`; None for other types."""
    options = getattr(annotation, "__args__", (annotation,))
    return next((option for option in options if isinstance(option, type) and issubclass(option, BaseModel)), None)
