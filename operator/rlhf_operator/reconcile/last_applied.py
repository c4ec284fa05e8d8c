"""What was applied is remembered in the object itself, so that it is applied again only when it is another."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from rlhf_common.names import GROUP

FINGERPRINT: Final = f"{GROUP}/applied"
"""Annotation with the fingerprint of what was applied."""


def fingerprint(manifest: Mapping[str, Any]) -> str:
    """Return the fingerprint of an object as it is applied."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]


def with_fingerprint(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object with the fingerprint by which it is known next time."""
    meta = manifest["metadata"]
    notes = {**meta.get("annotations", {}), FINGERPRINT: fingerprint(manifest)}
    return {**manifest, "metadata": {**meta, "annotations": notes}}
