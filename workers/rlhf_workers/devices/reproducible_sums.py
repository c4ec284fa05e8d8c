"""Requests sums from the CPU's matrix library whose order does not depend on a row's memory address.

Rule: only where its default depends on the address, which is MKL on processors without AVX-512, and only for a
deterministic job. Call it before the process's first matrix product, when MKL reads the variable; a user's value is not
changed. This must never be the only safeguard: `Tiles` still tries every shape, and libraries other than MKL ignore the
variable.
"""

import os
from typing import Final

import torch

VARIABLE: Final = "MKL_CBWR"
VALUE: Final = "AVX2,STRICT"
"""MKL's fastest code path with the same bits at any alignment, on processors without AVX-512."""
INDEPENDENT: Final = ("AVX512",)
"""Instruction sets whose default kernels gave the same bits at every address that is a multiple of 16 bytes, as rows of
models are (docs/determinism.md). A product with one column, such as a value head's, differs at other addresses."""


def ask_for_reproducible_sums() -> None:
    """Set the variable in this process if it is needed and unset."""
    if not torch.backends.cpu.get_cpu_capability().startswith(INDEPENDENT):
        os.environ.setdefault(VARIABLE, VALUE)
