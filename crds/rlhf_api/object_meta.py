"""Metadata of a manifest: what the API server takes as names, labels and annotations of any object.

Rule: says what the API server would say, in words; what only this kind of object asks of its name is a rule of the
definition (`rlhf_api.rules`). A generated name is judged as one that the API server could generate.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rlhf_api.kubernetes_names import label_problem, name_problem, qualified_problem
from rlhf_api.problems import Problem
from rlhf_api.yaml_document import Document

_FIELDS: Final = frozenset(
    {"annotations", "creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp", "finalizers"}
    | {"generateName", "generation", "labels", "managedFields", "name", "namespace", "ownerReferences"}
    | {"resourceVersion", "selfLink", "uid"}
)
"""Of every object's metadata; these have been the same since Kubernetes 1.0 but for managedFields."""
_GENERATED: Final = "x" * 5
"""In the place of the five characters by which the API server ends a generated name."""
_PREFIX_MAX: Final = 58
"""Characters of a generateName that the API server takes; the rest is cut off."""


def name_generated(document: Document) -> None:
    """Gives a document with generateName and no name one such as the API server would."""
    metadata = document.data.get("metadata")
    if not isinstance(metadata, dict) or metadata.get("name"):
        return
    prefix = metadata.get("generateName")
    if isinstance(prefix, str) and prefix:
        metadata["name"] = prefix[:_PREFIX_MAX] + _GENERATED


def problems_of(document: Document) -> list[Problem]:
    """What is wrong with the metadata of a document, whose generated name is there by now."""
    metadata = document.data.get("metadata")
    if not isinstance(metadata, Mapping):
        return []
    return [
        Problem(field, value, message, document.line_of(field)) for field, value, message in _of(metadata) if message
    ]


def _of(metadata: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    name = metadata.get("name")
    if name is None or name == "":
        yield "metadata.name", name, "is required: a short name such as my-job-1, or generateName"
    for field in ("name", "generateName", "namespace"):
        value = metadata.get(field)
        if value is not None and not isinstance(value, str):
            yield f"metadata.{field}", value, "must be text: write it in quotes"
    namespace = metadata.get("namespace")
    if isinstance(namespace, str) and namespace:
        yield "metadata.namespace", namespace, name_problem(namespace, label=True)
    yield from _texts(metadata, "labels")
    yield from _texts(metadata, "annotations")
    for field in sorted(metadata.keys() - _FIELDS):
        yield f"metadata.{field}", metadata[field], "unknown field: metadata has name, namespace, labels, annotations"


def _texts(metadata: Mapping[str, Any], field: str) -> Iterator[tuple[str, Any, str]]:
    given, path = metadata.get(field), f"metadata.{field}"
    if given is None:
        return
    if not isinstance(given, Mapping):
        yield path, given, "must be a mapping of names, each text"
        return
    for name, value in given.items():
        below = f"{path}.{name}"
        key = qualified_problem(name if field == "labels" else name.lower())
        if key:
            yield below, name, key
        elif not isinstance(value, str):
            yield below, value, "must be text: write it in quotes"
        elif field == "labels":
            yield below, value, label_problem(value)
