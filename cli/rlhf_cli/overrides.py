"""`--set path=value`: changes to a manifest before it is checked.

Rule: the changed manifest goes through the same checks as a written one, so nothing can be set that could not be
written. Values are true, false, null, numbers, `[...]`, `{...}`, or else text.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from rlhf_api import manifest
from rlhf_api.job import RLHFJob
from rlhf_api.problems import ManifestError, Problem
from rlhf_cli.local.errors import RunError

_NUMBER: Final = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_PART: Final = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")


def load(path: Path, overrides: Sequence[str]) -> RLHFJob:
    """The checked job of a manifest with its overrides. Raises ManifestError, RunError."""
    if not overrides:
        return manifest.load(path)
    try:
        data = manifest.job_document(path.read_text(encoding="utf-8")).data
    except (OSError, UnicodeDecodeError, ManifestError):
        return manifest.load(path)  # says what is wrong with the file itself
    for override in overrides:
        data = apply(data, override)
    try:
        return manifest.parse(json.dumps(data), str(path))
    except ManifestError as error:
        # Lines of the changed text would mislead.
        problems = [Problem(each.field, each.value, each.message) for each in error.problems]
        raise ManifestError(problems, f"{path} with --set {' --set '.join(overrides)}") from error


def apply(data: Any, override: str) -> Any:
    """`data` with one `path=value` set, or removed for null. Raises RunError for what cannot be a path."""
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
    value = parse_value(text)
    if value is None:
        place.pop(parts[-1], None)
    else:
        place[parts[-1]] = value
    return changed


def parse_value(text: str) -> Any:
    """The value a person means by `text`."""
    stripped = text.strip()
    words: dict[str, Any] = {"true": True, "false": False, "null": None}
    if stripped in words:
        return words[stripped]
    if _NUMBER.fullmatch(stripped):
        return int(stripped) if re.fullmatch(r"[-+]?\d+", stripped) else float(stripped)
    if stripped[:1] in ("[", "{", '"', "'"):
        try:
            return yaml.safe_load(stripped)
        except yaml.YAMLError as error:
            raise RunError(f"--set: {text!r} is not valid YAML") from error
    return text
