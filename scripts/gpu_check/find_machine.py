"""Finds what a machine has: its device, memory, processor and the versions that matter.

Rule: run in a process of its own, so that the runner holds no CUDA context and survives a driver that hangs.
"""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch", "triton", "transformers", "numpy", "grpcio", "protobuf", "pydantic", "safetensors", "tokenizers", "numba",
    "ortools",
)  # fmt: skip


def find_machine(device: str = "auto") -> dict[str, Any]:
    """Return the fields of `CheckedMachine` that the machine decides. `device`: auto, cpu or cuda."""
    import torch

    cuda = device != "cpu" and torch.cuda.is_available()
    if device == "cuda" and not cuda:
        raise SystemExit("gpu-check: --device cuda: torch finds no CUDA device here; use --device cpu --small")
    found: dict[str, Any] = {
        "device": "cuda:0" if cuda else "cpu",
        "gpus": torch.cuda.device_count() if cuda else 0,
        "cores": len(os.sched_getaffinity(0)),
        "versions": versions(torch),
    }
    if cuda:
        properties = torch.cuda.get_device_properties(0)
        capability = f"{properties.major}.{properties.minor}"
        return found | {
            "name": f"{properties.name} (compute capability {capability})",
            "memory_bytes": properties.total_memory,
            "bfloat16": torch.cuda.is_bf16_supported(including_emulation=False),
        }
    return found | {
        "name": processor(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "bfloat16": "avx512_bf16" in Path("/proc/cpuinfo").read_text(),
    }


def versions(torch: Any) -> dict[str, str]:
    """Versions of what the steps stand on; `absent` for what is not installed."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.release()}"}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    found["torch"] = torch.__version__
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        found["driver"] = driver()
    return found


def driver() -> str:
    """Version of NVIDIA's kernel driver."""
    path = Path("/proc/driver/nvidia/version")
    text = path.read_text().splitlines()[0] if path.exists() else "unknown"
    numbers = [word for word in text.split() if word[0].isdigit() and word.count(".") >= 1]
    return numbers[0] if numbers else text


def processor() -> str:
    """Return the model of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
