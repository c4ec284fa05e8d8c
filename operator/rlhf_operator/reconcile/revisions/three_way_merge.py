"""Three-way merge of plain data: applies a user's edits to the pinned version. Rule: pure.

An edited list is replaced as a whole unless a key identifies its items.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

_ABSENT: Final = object()
_KEYS: Final = ("mountPath", "name", "containerPort")
"""Keys that identify the items of a list; the first one that is unique is used, as a volume may be mounted at two
paths.
"""
OPEN: Final = "x-kubernetes-preserve-unknown-fields"
"""Marker in a schema: keys below it are the user's, not fields."""


def carried(base: Any, then: Any, now: Any) -> Any:
    """Return `base` with the changes from `then` to `now`. Lists whose items have unique keys are merged by them."""
    if then == now:
        return base
    if all(isinstance(value, dict) for value in (base, then, now)):
        return _carried(base, then, now)
    key = _key_of(base, then, now)
    if key is None:
        return now
    lists = ({item[key]: item for item in items} for items in (base, then, now))
    merged = _carried(*lists)
    # The order of a list may matter, so the user's order is used.
    ordered = [item[key] for item in now if item[key] in merged]
    return [merged[name] for name in (*ordered, *(name for name in merged if name not in set(ordered)))]


def _carried(base: Mapping[Any, Any], then: Mapping[Any, Any], now: Mapping[Any, Any]) -> dict[Any, Any]:
    merged = {}
    for key in (*base, *(key for key in now if key not in base)):
        had, was, value = base.get(key, _ABSENT), then.get(key, _ABSENT), now.get(key, _ABSENT)
        if was is value or was == value:
            value = had
        elif value is not _ABSENT and had is not _ABSENT and was is not _ABSENT:
            value = carried(had, was, value)
        if value is not _ABSENT:
            merged[key] = value
    return merged


def _key_of(*lists: Any) -> str | None:
    """Return the key that identifies the items of each list; None if there is none, or if one is not a list."""
    if not all(isinstance(items, list) for items in lists):
        return None
    for key in _KEYS:
        if all(_tells_apart(key, items) for items in lists):
            return key
    return None


def _tells_apart(key: str, items: Sequence[Any]) -> bool:
    values = [item.get(key) for item in items if isinstance(item, dict)]
    plain = all(isinstance(value, str | int) for value in values)
    return plain and len(set(values)) == len(values) == len(items)


def prune_unknown(document: Any, base: Any, schema: Mapping[str, Any], path: str = "") -> tuple[Any, list[str]]:
    """Return `document` without the fields that the writer of `base` did not know, and their paths.

    `base` has all fields that its writer knew. If it has no object, nothing is removed.
    """
    fields = schema.get("properties")
    if not isinstance(document, dict) or not isinstance(base, dict) or fields is None or schema.get(OPEN):
        return document, []
    pruned, left_out = {}, []
    for name, value in document.items():
        below = f"{path}.{name}" if path else name
        if name not in base:
            left_out.append(below)
            continue
        pruned[name], more = prune_unknown(value, base[name], fields.get(name, {}), below)
        left_out += more
    return pruned, left_out
