"""One line of text for an exception, for messages and logs."""

import traceback
from itertools import takewhile
from typing import Final

MAX_CHARACTERS: Final = 1000
"""Maximum length of the text."""
NATIVE_FRAMES: Final = "Exception raised from "
"""Start of the line before the C++ frames in an error of torch."""


def error_text(error: BaseException) -> str:
    """Return `Type: text` as one line, see `one_line`; for a SyntaxError the last line, without the source."""
    lines = traceback.format_exception_only(error)
    return one_line(lines[-1] if isinstance(error, SyntaxError) else "".join(lines))


def one_line(text: str) -> str:
    """Return the lines of a text, joined by "; " and cut at MAX_CHARACTERS.

    C++ frames and the advice of a CUDA error are left out.
    """
    stripped = [line.strip() for line in text.splitlines() if line.strip()]
    lines = list(takewhile(lambda line: not line.startswith(NATIVE_FRAMES), stripped))
    joined = "; ".join(lines[:1] if lines and "CUDA error" in lines[0] else lines)
    return joined if len(joined) <= MAX_CHARACTERS else f"{joined[: MAX_CHARACTERS - 3]}..."
