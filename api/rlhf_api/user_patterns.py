"""Regular expressions of users: checked when a manifest is read, compiled, and searched for.

Matching takes linear time: the engine is pydantic's (Rust's regex, RE2 syntax: no look-around, no backreferences).
"""

import math
import re
from functools import lru_cache
from typing import Final

from pydantic_core import PydanticCustomError, SchemaError, SchemaValidator, core_schema

MAX_PATTERN: Final = 200
"""Maximum characters of a pattern."""
MAX_REPETITIONS: Final = 100
"""Maximum product of the counts in braces of a pattern, which bounds the copies of a subpattern."""
PATTERN_ERROR: Final = "regular_expression"
"""Type of the error that `checked_pattern` raises."""
MAX_CACHED: Final = 1024
"""Maximum cached compiled patterns."""
_COUNT: Final = re.compile(r"\{(\d{0,9})(?:,(\d{0,9}))?\}")


def checked_pattern(pattern: str) -> str:
    """Return the pattern, for a pydantic field. Raises PydanticCustomError with the reason if it is invalid."""
    copies = math.prod(max(1, int(high or low or 1)) for low, high in _COUNT.findall(pattern))
    if copies > MAX_REPETITIONS:
        message = "must repeat nothing more than {most} times: lower the counts in braces"
        raise PydanticCustomError(PATTERN_ERROR, message, {"most": MAX_REPETITIONS})
    try:
        _compiled(pattern)
    except SchemaError as error:
        message = "must be a regular expression of RE2's syntax: {why}"
        why = str(error).splitlines()[-1].strip().rstrip(".")
        raise PydanticCustomError(PATTERN_ERROR, message, {"why": why}) from error
    return pattern


def pattern_found(pattern: str, text: str) -> bool:
    """Return whether a checked pattern matches anywhere in the text."""
    return _compiled(pattern).isinstance_python(text)


@lru_cache(maxsize=MAX_CACHED)
def _compiled(pattern: str) -> SchemaValidator:
    return SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))
