"""Adds a fingerprint of the manifest to a manifest to apply, so that a change can be recognised."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from rlhf_common.names import GROUP

FINGERPRINT: Final = f"{GROUP}/applied"
"""Annotation with the fingerprint of the applied manifest."""


def fingerprint(manifest: Mapping[str, Any]) -> str:
    """Return the fingerprint of a manifest to apply."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]


def with_fingerprint(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest with its fingerprint as an annotation."""
    meta = manifest["metadata"]
    notes = {**meta.get("annotations", {}), FINGERPRINT: fingerprint(manifest)}
    return {**manifest, "metadata": {**meta, "annotations": notes}}
