"""Parses JSON documents from files and from outside.

Rule: an invalid document is a ValueError, also one with more levels than the parser can process.
"""

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON document.

    Raises ValueError for a document that is no JSON, no Unicode or nested too deep.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
