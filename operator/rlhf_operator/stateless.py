"""What kopf is given in place of its storages: nothing is remembered on objects, so nothing is computed for it either.

kopf compares every object it hears of with what it last handled, by two deep copies an event, also when no handler
reacts to changes. Ours do not: they take each event as a hint to look, and whatever is written is reconcile's. Rule:
never writes, never copies.
"""

from collections.abc import Iterable
from typing import Any

import kopf


class NoDiffBase(kopf.DiffBaseStorage):
    """No last-handled state: every object looks as it always did."""

    def build(self, *, body: kopf.Body, extra_fields: Iterable[Any] | None = None) -> kopf.BodyEssence:
        """The same for every object."""
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        """Nothing was stored."""
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """Stores nothing."""


class NoProgress(kopf.ProgressStorage):
    """No progress of handlers: ours end at once, or with the process."""

    def fetch(self, **_: Any) -> None:
        """Nothing was stored."""

    def store(self, **_: Any) -> None:
        """Stores nothing."""

    def purge(self, **_: Any) -> None:
        """There is nothing to remove."""

    def touch(self, **_: Any) -> None:
        """Marks nothing."""

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        """There is nothing of ours in it."""
        return essence
