"""What was applied is remembered in the object itself, so that it is applied again only when it is another."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from rlhf_api.names import GROUP

FINGERPRINT: Final = f"{GROUP}/applied"
"""Annotation with the fingerprint of what was applied."""


def fingerprint(manifest: Mapping[str, Any]) -> str:
    """Of an object as it is applied."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]
