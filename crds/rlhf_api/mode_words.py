"""The words of modes before they were `Disabled` and `Enabled`: `Off` and `On`, of which YAML 1.1 makes booleans.

Pure. What an earlier version wrote is read with the present words, and a process of an earlier version is sent its own.
A user who writes an old word is told the new one (`validation_messages`). The module is deleted with protocol 0.
"""

import copy
from collections.abc import Mapping
from typing import Any, Final

Json = dict[str, Any]

PRESENT: Final = {"Off": "Disabled", "On": "Enabled"}
"""Word before -> word now."""
REMEDIES: Final = {"off": "Disabled", "on": "Enabled", "false": "Disabled", "true": "Enabled"}
"""The same in lower case, and what YAML reads for them without quotes."""
_BEFORE: Final = {now: before for before, now in PRESENT.items()}
_PATHS: Final = (
    ("generation", "speculation", "mode"),
    ("inference", "overlap"),
    ("inference", "incremental"),
    ("fusion", "interStage", "mode"),
    ("fusion", "interStage", "balance"),
    ("fusion", "intraStage", "mode"),
    ("checkpoints", "onDeletion"),
    ("scheduling", "gang", "mode"),
)
"""Fields of a spec that had them."""


def present(spec: Json) -> Json:
    """Return a spec with the words of now; itself where it has no other."""
    return _replaced(spec, PRESENT)


def before(spec: Json) -> Json:
    """Return a spec with the words that protocol 0 knows."""
    return _replaced(spec, _BEFORE)


def like(base: Json, spec: Json) -> Json:
    """Return `spec` with the words that `base` has: who reads `base` is to read it."""
    return before(spec) if present(base) is not base else present(spec)


def _replaced(spec: Json, words: Mapping[str, str]) -> Json:
    changed = spec
    for path in _PATHS:
        holder: Any = spec
        for name in path[:-1]:
            holder = holder.get(name) if isinstance(holder, dict) else None
        word = holder.get(path[-1]) if isinstance(holder, dict) else None
        if not isinstance(word, str) or word not in words:
            continue
        if changed is spec:
            changed = copy.deepcopy(spec)
        target = changed
        for name in path[:-1]:
            target = target[name]
        target[path[-1]] = words[word]
    return changed
