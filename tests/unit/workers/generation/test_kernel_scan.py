"""vLLM's scan for kernels works with objects that answer to any attribute, such as one of numba's."""

import subprocess
import sys

import pytest

SCAN = """
import numba.core.codegen
import pytest
from vllm.platforms import current_platform
from rlhf_workers.generation.vllm_engine import kernel_scan
{}
current_platform.register_triton_kernel_overrides()
print("scanned")
"""


def scan(prepared: str) -> subprocess.CompletedProcess[str]:
    """Scan in a separate process, because the replaced kernels stay replaced."""
    command = [sys.executable, "-c", SCAN.format(prepared)]
    return subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)


@pytest.mark.full
def test_vllm_starts_where_numba_was_imported() -> None:
    done = scan("kernel_scan.be_safe()")
    assert "scanned" in done.stdout, done.stderr


def test_an_object_without_attributes_has_none() -> None:
    from rlhf_workers.generation.vllm_engine.kernel_scan import attributes

    class Odd:
        __slots__ = ()

        def __getattr__(self, name: str) -> str:
            return name

    assert attributes(Odd()) == {}
    assert attributes(test_an_object_without_attributes_has_none) == {}
