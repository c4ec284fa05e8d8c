"""vLLM looks through the objects of all imported modules for kernels that it replaces; some objects answer to any name.

One of llvmlite, which numba brings, has a `__dict__` that is a function: vLLM 0.32 then ends before it loads anything.
Rule: what is no dictionary has no attributes to look at. Must never hide an object's own attributes from vLLM.
"""

from typing import Any

from vllm.triton_utils import dispatcher


def attributes(value: Any) -> dict[str, Any]:
    """Return `vars(value)`; nothing where that is no dictionary."""
    result = vars(value)
    return result if isinstance(result, dict) else {}


def be_safe() -> None:
    """Let vLLM's scan use `attributes`."""
    dispatcher.vars = attributes
