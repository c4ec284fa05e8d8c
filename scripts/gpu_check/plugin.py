"""The pytest plug-in of the steps in tests/gpu: the machine, a step's figures, and its result.

Owns the fixtures `machine` and `figures`, the time limit of a step, and the results of tests with the marker `gpu` in
the JSON file of `--figures`. Each recorded value is on disk before the call returns. Must never affect other tests.
"""

import importlib.metadata
import math
import os
import platform
import sys
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest
import torch

from gpu_check.results import FAILED, LEFT_OUT, NOT_HERE, PASSED, RUNNING, Results

Figure = float | int | str | bool
T = TypeVar("T")
SMALL_SECONDS: Final = 180
"""Limit in seconds of a step with small sizes, against hangs only."""
FIT: Final = 0.5
"""Share of its limit that must be left in the budget to start a step; limits are generous."""
BUSY: Final = 5
"""Factor of its limit that a step may take on a CPU within the budget, because it shares the cores."""
PACKAGES: Final = (
    "torch", "triton", "transformers", "numpy", "grpcio", "protobuf", "pydantic", "safetensors", "tokenizers", "numba",
    "ortools",
)  # fmt: skip


@dataclass(frozen=True)
class CheckedMachine:
    """The machine that a step runs on."""

    device: torch.device
    gpus: int
    cores: int
    bfloat16: bool
    """Whether the device computes in bfloat16 natively."""
    small: bool
    """Whether the step uses its small sizes."""
    scratch: Path
    """Folder for this step only."""
    results: Mapping[str, Any]
    """Results of earlier steps of this run, by name."""

    @property
    def cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Types that steps compute in: first the one that must be fast, then the one that must be exact."""
        return (torch.bfloat16, torch.float32) if self.bfloat16 or not self.cuda else (torch.float32,)

    def sized(self, small: T, gpu: T) -> T:
        """Return the sizes to use: the small ones, or those for a GPU."""
        return small if self.small else gpu

    def measured(self, step: str, figure: str) -> float | None:
        """Return a figure that an earlier step of this run recorded; None without one."""
        found = self.results.get(step, {}).get("figures", {}).get(figure, {}).get("value")
        return float(found) if isinstance(found, int | float) else None


class Figures:
    """Measurements and checks of one step; with results, each record is written to disk immediately."""

    def __init__(self, step: str, shows: str, limit_seconds: float, results: Results | None) -> None:
        self.figures: dict[str, dict[str, Figure]] = {}
        self.tables: dict[str, list[dict[str, Figure]]] = {}
        self.checks: list[dict[str, Figure]] = []
        self.results = results
        self._step, self._shows, self._limit_seconds = step, shows, limit_seconds
        self._started = time.monotonic()
        self.end(RUNNING)

    def say(self, text: str) -> None:
        """Print the next action, while it runs and in the log."""
        sys.stdout.write(f"[{time.monotonic() - self._started:6.1f} s] {text}\n")
        sys.stdout.flush()

    def add(self, name: str, value: Figure, unit: str = "") -> None:
        """Record one measured number (or word)."""
        self.figures[name] = {"value": _plain(value), "unit": unit}
        self.say(f"{name} = {_plain(value)} {unit}".rstrip())
        self.end(RUNNING)

    def row(self, table: str, **cells: Figure) -> None:
        """Add a row to a table of this step; the first row's names become its columns."""
        row = {name: _plain(value) for name, value in cells.items()}
        self.tables.setdefault(table, []).append(row)
        self.say(f"{table}: " + ", ".join(f"{name} {value}" for name, value in row.items()))
        self.end(RUNNING)

    def check(self, name: str, passed: bool, found: str) -> None:
        """Record whether a condition holds, with the figures it depends on; the step continues in any case."""
        self.checks.append({"name": name, "passed": bool(passed), "found": found})
        self.say(f"{'passed' if passed else 'FAILED'}: {name}: {found}")
        self.end(RUNNING)

    def judge(self) -> None:
        """Fail the test if a check failed, or neither a check nor a figure was recorded."""
        failed = [str(check["name"]) for check in self.checks if not check["passed"]]
        if failed:
            pytest.fail(f"{len(failed)} of {len(self.checks)} checks failed: {', '.join(failed)}", pytrace=False)
        if not self.checks and not self.figures:
            pytest.fail("it said nothing", pytrace=False)

    def end(self, status: str, why: str = "") -> None:
        """Write the status of the step."""
        if self.results is not None:
            said: dict[str, Any] = {"shows": self._shows, "figures": self.figures, "tables": self.tables}
            said |= {"checks": self.checks, "limit_seconds": self._limit_seconds if status == RUNNING else 0}
            self.results.put(self._step, status, why, time.monotonic() - self._started, **said)


FIGURES: Final = pytest.StashKey[Figures]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that the command passes to the process of a step."""
    parser.addoption("--figures", type=Path, help="folder of the JSON file that the steps in tests/gpu write")
    parser.addoption("--small", action="store_true", help="small sizes: seconds on two CPU cores")
    parser.addoption("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.addoption("--seconds-left", type=float, default=math.inf, help="left of the budget")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Set the time limit of each step."""
    for item in items:
        if item.get_closest_marker("gpu"):
            limit = _limit(item)
            patience = limit * BUSY if _machine(config)["device"] == "cpu" else limit
            seconds = min(patience, max(config.getoption("--seconds-left", math.inf), 1))
            item.add_marker(pytest.mark.timeout(seconds, method="thread"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start a step, or skip it if the budget is too short for it."""
    if item.get_closest_marker("gpu") is None:
        return
    folder, left = item.config.getoption("--figures", None), item.config.getoption("--seconds-left", math.inf)
    results = Results(folder) if folder else None
    if results is not None:
        results.content["machine"] = _machine(item.config)
        results.content["small"] |= _machine(item.config)["device"] == "cpu"
    timeout = item.get_closest_marker("timeout")
    assert timeout is not None
    shows = " ".join((item.function.__doc__ or "").split()).removesuffix(".")  # type: ignore[attr-defined]
    item.stash[FIGURES] = Figures(item.path.stem.removeprefix("test_"), shows, timeout.args[0], results)
    limit = _limit(item)
    if left < FIT * limit:
        pytest.skip(f"{LEFT_OUT}: {left:.0f} s of the budget were left, its limit is {limit:.0f} s")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Judge a step at its end."""
    result = yield
    if FIGURES in item.stash:
        item.stash[FIGURES].judge()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Write the result of a step."""
    report = yield
    if FIGURES in item.stash and call.excinfo is not None:
        why = call.excinfo.exconly().partition("\n")[0].removeprefix("Failed: ").removeprefix("Skipped: ")
        skipped = LEFT_OUT if why.startswith(f"{LEFT_OUT}: ") else NOT_HERE
        item.stash[FIGURES].end(skipped if report.skipped else FAILED, why.removeprefix(f"{LEFT_OUT}: "))
    elif FIGURES in item.stash and report.when == "call":
        item.stash[FIGURES].end(PASSED)
    return report


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Figures:
    """Return the recorder of a step's measurements."""
    recorded: Figures = request.node.stash[FIGURES]
    return recorded


@pytest.fixture
def machine(request: pytest.FixtureRequest, tmp_path: Path, figures: Figures) -> CheckedMachine:
    """Return the machine that the step runs on."""
    found = _machine(request.config)
    return CheckedMachine(
        device=torch.device(found["device"]),
        gpus=found["gpus"],
        cores=found["cores"],
        bfloat16=found["bfloat16"],
        small=_is_small(request.node),
        scratch=tmp_path,
        results=figures.results.steps if figures.results is not None else {},
    )


def _limit(item: pytest.Item) -> float:
    """Return the limit of a step in seconds, on a GPU or with its small sizes."""
    marker = item.get_closest_marker("gpu")
    assert marker is not None
    return SMALL_SECONDS if _is_small(item) else float(marker.kwargs["seconds"])


def _is_small(item: pytest.Item) -> bool:
    """Return whether a step uses its small sizes.

    Large ones need a GPU with enough memory.
    """
    marker, found = item.get_closest_marker("gpu"), _machine(item.config)
    assert marker is not None
    too_little = found["memory_bytes"] < marker.kwargs.get("gigabytes", 0) * 1e9
    return bool(item.config.getoption("--small", False)) or found["device"] == "cpu" or too_little


def _plain(value: Any) -> Figure:
    """Convert a number of numpy or torch to a Python number with five digits, or to a word if JSON has no such
    number."""
    if isinstance(value, str | bool):
        return value
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, bool | int):
        return number
    return float(f"{number:.5g}") if math.isfinite(number) else str(number)


def _machine(config: pytest.Config) -> dict[str, Any]:
    return find_machine(config.getoption("--device", "auto"))


@cache
def find_machine(device: str) -> dict[str, Any]:
    """Return the properties of the machine, as in the JSON file. `device` is auto, cpu or cuda."""
    cuda = device != "cpu" and torch.cuda.is_available()
    if device == "cuda" and not cuda:
        raise pytest.UsageError("--device cuda: torch finds no CUDA device here; use --device cpu --small")
    found: dict[str, Any] = {
        "device": "cuda:0" if cuda else "cpu",
        "gpus": torch.cuda.device_count() if cuda else 0,
        "cores": len(os.sched_getaffinity(0)),
        "versions": versions(),
    }
    if cuda:
        card = torch.cuda.get_device_properties(0)
        return found | {
            "name": f"{card.name} (compute capability {card.major}.{card.minor})",
            "memory_bytes": card.total_memory,
            "bfloat16": torch.cuda.is_bf16_supported(including_emulation=False),
        }
    processor = Path("/proc/cpuinfo").read_text()
    named = (line.partition(":")[2].strip() for line in processor.splitlines() if line.startswith("model name"))
    return found | {
        "name": next(named, platform.machine()),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "bfloat16": "avx512_bf16" in processor,
    }


def versions() -> dict[str, str]:
    """Return the versions of the libraries that the steps use; `absent` for those not installed."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.release()}"}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    driver = Path("/proc/driver/nvidia/version")
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if driver.exists():
        words = driver.read_text().splitlines()[0].split()
        found["driver"] = next((word for word in words if word[0].isdigit() and "." in word), "unknown")
    return found | {"torch": torch.__version__}
