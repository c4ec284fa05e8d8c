"""Makes vLLM's scan for replaceable kernels safe: it reads the objects of all imported modules.

An object of llvmlite, which numba imports, has a `__dict__` that is a function; vLLM 0.32 then fails before it loads
anything.
"""

from typing import Any

from vllm.triton_utils import dispatcher


def attributes(value: Any) -> dict[str, Any]:
    """Return `vars(value)`; empty if that is no dictionary."""
    result = vars(value)
    return result if isinstance(result, dict) else {}


def be_safe() -> None:
    """Make vLLM's scan use `attributes`."""
    dispatcher.vars = attributes
