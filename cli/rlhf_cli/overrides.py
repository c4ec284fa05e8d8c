"""`--set path=value`: changes to the data of a manifest before it is checked. Pure.

Rule: values are true, false, null, numbers, `[...]`, `{...}`, quoted text, or else text. `load_job` checks the field
and value afterwards.
"""

import json
import re
from typing import Any, Final

import yaml

from rlhf_cli.local.errors import RunError
from rlhf_common.surrogates import half_pair

_NUMBER: Final = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_PART: Final = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")


def apply(data: Any, override: str) -> Any:
    """Return `data` with one `path=value` set, or with the field removed for null. Raises RunError for an invalid path
    or value.
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
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        why = "close every bracket and quote, and write no impossible date, thousand digits or hundred brackets"
        raise RunError(f"--set {override[:80]!r}: the value is not valid YAML; {why}") from error
    if half_pair(value) is not None:
        raise RunError(f"--set {override!r}: the value has half a surrogate pair, which is not text")
    if value is None:
        place.pop(parts[-1], None)
    else:
        place[parts[-1]] = value
    return changed


def parse_value(text: str) -> Any:
    """Parse the value that a person means by `text`.

    Raises YAMLError for broken YAML in brackets or quotes, ValueError for an impossible date or thousands of digits,
    and RecursionError for hundreds of nested brackets.
    """
    stripped = text.strip()
    words: dict[str, Any] = {"true": True, "false": False, "null": None}
    if stripped in words:
        return words[stripped]
    if _NUMBER.fullmatch(stripped):
        return int(stripped) if re.fullmatch(r"[-+]?\d+", stripped) else float(stripped)
    if stripped[:1] in ("[", "{", '"', "'"):
        return yaml.safe_load(stripped)
    return text
