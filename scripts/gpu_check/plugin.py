"""The pytest plug-in of the steps in tests/gpu: the machine, the figures that a step records, and how the step ended.

Owns the fixtures `machine` and `figures`, the time limit of a step, and what a test with the marker `gpu` leaves in the
JSON file of `--figures`. All that a step says is on disk before the call returns. It must never touch another test.
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
"""Limit of a step with small sizes: against hanging alone, since on a busy machine all takes many times as long."""
FIT: Final = 0.5
"""A step is begun while this share of its limit is left of the budget: limits are generous."""
BUSY: Final = 5
"""Times its limit that a step may take on a CPU while the budget lasts: there it shares the cores with anything."""
PACKAGES: Final = (
    "torch", "triton", "transformers", "numpy", "grpcio", "protobuf", "pydantic", "safetensors", "tokenizers", "numba",
    "ortools",
)  # fmt: skip


@dataclass(frozen=True)
class CheckedMachine:
    """What a step runs on."""

    device: torch.device
    gpus: int
    cores: int
    bfloat16: bool
    """The device computes in bfloat16 itself."""
    small: bool
    """The step is to take its small sizes."""
    scratch: Path
    """A folder of this step alone."""
    results: Mapping[str, Any]
    """What earlier steps of this run recorded, by name."""

    @property
    def cuda(self) -> bool:
        """True on a GPU."""
        return self.device.type == "cuda"

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The types of numbers that steps compute in: what must be fast first, then what must be equal."""
        return (torch.bfloat16, torch.float32) if self.bfloat16 or not self.cuda else (torch.float32,)

    def sized(self, small: T, gpu: T) -> T:
        """Return the sizes to run with: those for a CPU, which take seconds, or those for a GPU."""
        return small if self.small else gpu

    def measured(self, step: str, figure: str) -> float | None:
        """Return a figure that an earlier step of this run recorded; None when there is none."""
        found = self.results.get(step, {}).get("figures", {}).get(figure, {}).get("value")
        return float(found) if isinstance(found, int | float) else None


class Figures:
    """What one step measured and found; with results, each call is on disk at once."""

    def __init__(self, step: str, shows: str, limit_seconds: float, results: Results | None) -> None:
        self.figures: dict[str, dict[str, Figure]] = {}
        self.tables: dict[str, list[dict[str, Figure]]] = {}
        self.checks: list[dict[str, Figure]] = []
        self.results = results
        self._step, self._shows, self._limit_seconds = step, shows, limit_seconds
        self._started = time.monotonic()
        self.end(RUNNING)

    def say(self, text: str) -> None:
        """Print what is about to be done: shown while it runs, and part of the log."""
        sys.stdout.write(f"[{time.monotonic() - self._started:6.1f} s] {text}\n")
        sys.stdout.flush()

    def add(self, name: str, value: Figure, unit: str = "") -> None:
        """Record one number (or word) that was measured or read."""
        self.figures[name] = {"value": _plain(value), "unit": unit}
        self.say(f"{name} = {_plain(value)} {unit}".rstrip())
        self.end(RUNNING)

    def row(self, table: str, **cells: Figure) -> None:
        """Add a row to a table of this step; the first row's names are its columns."""
        row = {name: _plain(value) for name, value in cells.items()}
        self.tables.setdefault(table, []).append(row)
        self.say(f"{table}: " + ", ".join(f"{name} {value}" for name, value in row.items()))
        self.end(RUNNING)

    def check(self, name: str, passed: bool, found: str) -> None:
        """Record whether something holds, with the figures that it was judged by; the step goes on in any case."""
        self.checks.append({"name": name, "passed": bool(passed), "found": found})
        self.say(f"{'passed' if passed else 'FAILED'}: {name}: {found}")
        self.end(RUNNING)

    def judge(self) -> None:
        """Fail the test when a check did not hold, or nothing was said."""
        failed = [str(check["name"]) for check in self.checks if not check["passed"]]
        if failed:
            pytest.fail(f"{len(failed)} of {len(self.checks)} checks failed: {', '.join(failed)}", pytrace=False)
        if not self.checks and not self.figures:
            pytest.fail("it said nothing", pytrace=False)

    def end(self, status: str, why: str = "") -> None:
        """Write how the step stands."""
        if self.results is not None:
            said: dict[str, Any] = {"shows": self._shows, "figures": self.figures, "tables": self.tables}
            said |= {"checks": self.checks, "limit_seconds": self._limit_seconds if status == RUNNING else 0}
            self.results.put(self._step, status, why, time.monotonic() - self._started, **said)


FIGURES: Final = pytest.StashKey[Figures]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what the command says to the process of a step."""
    parser.addoption("--figures", type=Path, help="folder of the JSON file that the steps in tests/gpu write")
    parser.addoption("--small", action="store_true", help="small sizes: seconds on two CPU cores")
    parser.addoption("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.addoption("--seconds-left", type=float, default=math.inf, help="left of the budget")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each step its time limit."""
    for item in items:
        if item.get_closest_marker("gpu"):
            limit = _limit(item)
            patience = limit * BUSY if _machine(config)["device"] == "cpu" else limit
            seconds = min(patience, max(config.getoption("--seconds-left", math.inf), 1))
            item.add_marker(pytest.mark.timeout(seconds, method="thread"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin a step, or leave it out when what is left of the budget is too short for it."""
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
    """Write how a step ended."""
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
    """Where a step says what it measured."""
    recorded: Figures = request.node.stash[FIGURES]
    return recorded


@pytest.fixture
def machine(request: pytest.FixtureRequest, tmp_path: Path, figures: Figures) -> CheckedMachine:
    """What the step runs on."""
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
    """Return the seconds that a step may take on a GPU, or with its small sizes."""
    marker = item.get_closest_marker("gpu")
    assert marker is not None
    return SMALL_SECONDS if _is_small(item) else float(marker.kwargs["seconds"])


def _is_small(item: pytest.Item) -> bool:
    """True where a step takes its small sizes: on a CPU the large ones would take hours, and not every GPU has room."""
    marker, found = item.get_closest_marker("gpu"), _machine(item.config)
    assert marker is not None
    too_little = found["memory_bytes"] < marker.kwargs.get("gigabytes", 0) * 1e9
    return bool(item.config.getoption("--small", False)) or found["device"] == "cpu" or too_little


def _plain(value: Any) -> Figure:
    """Return a number of numpy or torch as one of Python, in five digits; what JSON has no number for as a word."""
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
    """Return what a machine has, as the JSON file says it. `device`: auto, cpu or cuda."""
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
    """Return the versions of what the steps stand on; `absent` for what is not installed."""
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
