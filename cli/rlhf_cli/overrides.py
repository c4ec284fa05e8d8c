"""`--set path=value`: changes to the data of a manifest before it is checked. Pure.

Rule: values are true, false, null, numbers, `[...]`, `{...}`, quoted text, or else text. `load_job` checks the field
and value afterwards.
"""

import json
import re
from typing import Any, Final

from rlhf_api.problems import ManifestError
from rlhf_api.yaml_document import read_document
from rlhf_cli.local.errors import RunError
from rlhf_common.surrogates import half_pair

_NUMBER: Final = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_PART: Final = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")


def apply(data: Any, override: str) -> Any:
    """Return `data` with one `path=value` set, or with the field removed for null; add absent mappings.

    Data that is no mapping is returned unchanged.
    Raises RunError for an invalid path, for a path through a field that is no mapping, and for an invalid value.
    """
    path, separator, text = override.partition("=")
    parts = path.strip().split(".")
    if not separator or parts[0] not in ("spec", "metadata") or len(parts) < 2 or not all(map(_PART.fullmatch, parts)):
        raise RunError(f"--set {override!r}: give a field and a value, such as spec.iterations=5")
    if not isinstance(data, dict):
        return data
    changed = json.loads(json.dumps(data))
    place = changed
    for depth, part in enumerate(parts[:-1]):
        if place.get(part) is None:
            place[part] = {}
        place = place[part]
        if not isinstance(place, dict):
            raise RunError(f"--set {override!r}: {'.'.join(parts[: depth + 1])} is no mapping in this manifest")
    try:
        value = parse_value(text)
    except ValueError as error:
        why = error.problems[0].message if isinstance(error, ManifestError) else str(error)
        why = why.removeprefix("not valid YAML: ")
        raise RunError(f"--set {override[:80]!r}: the value is not valid YAML: {why}") from error
    if half_pair(value) is not None:
        raise RunError(f"--set {override!r}: the value has half a surrogate pair, which is not text")
    if value is None:
        place.pop(parts[-1], None)
    else:
        place[parts[-1]] = value
    return changed


def parse_value(text: str) -> Any:
    """Parse the value that a person means by `text`; brackets and quotes are read as in a manifest.

    Raises ManifestError for invalid YAML in brackets or quotes, and ValueError for a number of thousands of digits.
    """
    stripped = text.strip()
    words: dict[str, Any] = {"true": True, "false": False, "null": None}
    if stripped in words:
        return words[stripped]
    if _NUMBER.fullmatch(stripped):
        return int(stripped) if re.fullmatch(r"[-+]?\d+", stripped) else float(stripped)
    if stripped[:1] in ("[", "{", '"', "'"):
        return read_document(stripped).data
    return text
