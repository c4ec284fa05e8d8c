"""Asks a Python module of this package in a child process: one JSON question in, one JSON answer out.

So computations of seconds do not block the coordinator.
"""

import asyncio
import contextlib
import json
import sys
from typing import Any

from rlhf_common.json_document import parse_json


async def ask_module(module: str, question: dict[str, Any], timeout_seconds: float) -> dict[str, Any]:
    """Return the answer of a module. Raises OSError, RuntimeError with the child's last line, TimeoutError with the
    limit, ValueError for an answer that is no JSON object."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = await asyncio.wait_for(child.communicate(json.dumps(question).encode()), timeout_seconds)
    except TimeoutError:
        raise TimeoutError(f"it took more than {timeout_seconds:.0f} s") from None
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
    if child.returncode:
        lines = err.decode(errors="replace").strip().splitlines() or [f"exit code {child.returncode}"]
        raise RuntimeError(lines[-1])
    answer = parse_json(out)
    if not isinstance(answer, dict):
        raise ValueError(f"the answer is a JSON {type(answer).__name__}, not an object")
    return answer
