r"""Regular expressions that users write and programs of others are matched by: compiled, checked, searched for.

Rule: time is linear in the text, whatever the pattern, so that neither a manifest nor a log line can stall whoever
looks. The engine is pydantic's (Rust's regex, of RE2's syntax: no look-around, no backreferences); Python's `re` never
sees a user's pattern. Repetitions are written out when one is compiled, so their number is bounded too.
"""

import math
import re
from functools import lru_cache
from typing import Final

from pydantic_core import PydanticCustomError, SchemaError, SchemaValidator, core_schema

LONGEST: Final = 200
"""Characters of a pattern."""
REPEATED: Final = 100
"""Most copies that the counts in braces, multiplied, make of a part of it: a search then takes milliseconds at most."""
ERROR: Final = "regular_expression"
"""Type of pydantic's error for a pattern that is refused."""
REMEMBERED: Final = 1024
"""Compiled patterns that are kept."""
_COUNT: Final = re.compile(r"\{(\d{0,9})(?:,(\d{0,9}))?\}")


def checked(pattern: str) -> str:
    """The pattern, for a pydantic field. Raises PydanticCustomError with what is wrong with it."""
    copies = math.prod(max(1, int(most or least or 1)) for least, most in _COUNT.findall(pattern))
    if copies > REPEATED:
        told = "must repeat nothing more than {most} times: lower the counts in braces"
        raise PydanticCustomError(ERROR, told, {"most": REPEATED})
    try:
        _compiled(pattern)
    except SchemaError as error:
        told = "must be a regular expression of RE2's syntax: {why}"
        raise PydanticCustomError(ERROR, told, {"why": str(error).splitlines()[-1].strip().rstrip(".")}) from error
    return pattern


def found(pattern: str, text: str) -> bool:
    """Whether the text has it anywhere; the pattern is one that was checked."""
    return _compiled(pattern).isinstance_python(text)


@lru_cache(maxsize=REMEMBERED)
def _compiled(pattern: str) -> SchemaValidator:
    return SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))
