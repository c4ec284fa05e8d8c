"""One line of text for an exception, for messages and logs. Standard library only, for processes of user code."""

import traceback
from typing import Final

MAX_CHARACTERS: Final = 1000
"""Maximum length of the text."""


def error_text(error: BaseException) -> str:
    """Return `Type: text` with the lines of a longer text joined by "; ", cut at MAX_CHARACTERS.

    A SyntaxError gives its last line, without the source. The advice after the first line of a CUDA error is left out.
    """
    text = "".join(traceback.format_exception_only(error)).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if isinstance(error, SyntaxError):
        lines = lines[-1:]
    elif "CUDA error" in lines[0]:
        lines = lines[:1]
    joined = "; ".join(lines)
    return joined if len(joined) <= MAX_CHARACTERS else f"{joined[: MAX_CHARACTERS - 3]}..."
