"""Requests sums from the CPU's matrix library whose order does not depend on a row's memory address.

Rule: call it before the process's first matrix product, when MKL reads the variable. A user's value is not changed.
"""

import os
from typing import Final

import torch

VARIABLE: Final = "MKL_CBWR"
VALUE: Final = "AVX2,STRICT"
"""MKL's code path for AVX2, with the same bits at any alignment."""
INDEPENDENT: Final = ("AVX512",)
"""Prefixes of torch's names of the instruction sets for which the variable is not set."""


def ask_for_reproducible_sums() -> None:
    """Set the variable in this process if it is needed and unset."""
    if not torch.backends.cpu.get_cpu_capability().startswith(INDEPENDENT):
        os.environ.setdefault(VARIABLE, VALUE)
