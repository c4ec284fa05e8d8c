"""Asks the matrix library of the CPU for sums whose order does not follow from where in memory a row lies.

Rule: only where its default depends on that: MKL on processors without AVX-512, and only for a deterministic job. To be
called before the process's first matrix product, at which MKL reads the variable; a value that a user gave stays. Must
never be relied on alone: `Tiles` still tries every shape, and a library other than MKL does not know the variable.
"""

import os
from typing import Final

import torch

VARIABLE: Final = "MKL_CBWR"
VALUE: Final = "AVX2,STRICT"
"""The fastest code path of which MKL promises the same bits at any alignment, on processors that have no AVX-512."""
INDEPENDENT: Final = ("AVX512",)
"""Instructions whose default kernels gave the same bits at any alignment (docs/determinism.md)."""


def ask_for_reproducible_sums() -> None:
    """Set the variable in this process where it is needed and not given."""
    if not torch.backends.cpu.get_cpu_capability().startswith(INDEPENDENT):
        os.environ.setdefault(VARIABLE, VALUE)
