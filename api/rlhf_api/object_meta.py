"""Checks the metadata of a manifest: fields, namespace, and keys and values of labels and annotations.

A problem is something that `kubectl apply` or `kubectl create` with strict field validation rejects.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rlhf_api.problems import Problem
from rlhf_api.yaml_document import Document
from rlhf_common.kubernetes_names import label_problem, name_problem, qualified_problem

_FIELDS: Final = frozenset(
    {"annotations", "creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp", "finalizers"}
    | {"generateName", "generation", "labels", "managedFields", "name", "namespace", "ownerReferences"}
    | {"resourceVersion", "selfLink", "uid"}
)
"""Fields of an object's metadata."""
_GENERATED: Final = "x" * 5
"""Placeholder for the five characters that the API server adds to a generateName."""
_PREFIX_MAX: Final = 58
"""Characters of a generateName that the API server uses; it cuts the rest."""


def fill_in_generated_name(document: Document) -> None:
    """Give a document with generateName and without name a name of the length that the API server would give."""
    metadata = document.data.get("metadata")
    if not isinstance(metadata, dict) or metadata.get("name"):
        return
    prefix = metadata.get("generateName")
    if isinstance(prefix, str) and prefix:
        metadata["name"] = prefix[:_PREFIX_MAX] + _GENERATED


def metadata_problems(document: Document) -> list[Problem]:
    """Return the problems of a document's metadata; a generated name is already filled in."""
    metadata = document.data.get("metadata")
    if not isinstance(metadata, Mapping):
        return []
    return [
        Problem(field, value, message, document.line_of(field))
        for field, value, message in _metadata_problems(metadata)
        if message
    ]


def _metadata_problems(metadata: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
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
    entries, path = metadata.get(field), f"metadata.{field}"
    if entries is None:
        return
    if not isinstance(entries, Mapping):
        yield path, entries, "must be a mapping of names, each text"
        return
    for name, value in entries.items():
        below = f"{path}.{name}"
        key = qualified_problem(name if field == "labels" else name.lower())
        if key:
            yield below, name, key
        elif not isinstance(value, str):
            yield below, value, "must be text: write it in quotes"
        elif field == "labels":
            yield below, value, label_problem(value)
