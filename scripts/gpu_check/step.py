"""What a step is, what it is given, and how it says what it found.

Rule: everything that a step says is on disk before the call returns, so that a kill at any moment leaves it. Must never
import torch or a package of the project: the runner reads this module on a machine that may have neither.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

S = TypeVar("S")

Figure = float | int | str | bool


class NotHereError(Exception):
    """The step cannot run on this machine, and says why in one line; this is no failure."""


@dataclass(frozen=True)
class CheckedMachine:
    """What a step runs on."""

    device: str
    """`cpu` or `cuda:0`."""
    name: str
    """Product name of the GPU, or the model of the processor."""
    memory_bytes: int
    """Memory of the device."""
    gpus: int
    cores: int
    bfloat16: bool
    """The device computes in bfloat16 itself."""
    versions: Mapping[str, str]
    """Version of Python, torch, transformers and what else matters."""
    small: bool
    """The step was given its small sizes."""
    scratch: Path
    """A folder of this step's own, removed after it."""
    results: Mapping[str, Any] = field(default_factory=dict)
    """What earlier steps of this run reported, by name."""

    @property
    def cuda(self) -> bool:
        """True on a GPU."""
        return self.device.startswith("cuda")

    def measured(self, step: str, figure: str) -> float | None:
        """Return a figure that an earlier step of this run measured; None when there is none."""
        found = self.results.get(step, {}).get("figures", {}).get(figure, {}).get("value")
        return float(found) if isinstance(found, int | float) else None


class Report:
    """What one step says, written to a file at every call."""

    def __init__(self, path: Path | None) -> None:
        """With no path nothing is written: for a step that a test calls by itself."""
        self.figures: dict[str, dict[str, Figure]] = {}
        self.tables: dict[str, list[dict[str, Figure]]] = {}
        self.checks: list[dict[str, Figure]] = []
        self._path = path
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        """Prints what is about to be done: shown while it runs, and kept in the log."""
        sys.stdout.write(f"[{time.monotonic() - self._started:6.1f} s] {text}\n")
        sys.stdout.flush()

    def figure(self, name: str, value: Figure, unit: str = "") -> None:
        """Reports one number (or word) that was measured or read."""
        self.figures[name] = {"value": _plain(value), "unit": unit}
        self.say(f"{name} = {_plain(value)} {unit}".rstrip())
        self._write()

    def row(self, table: str, **cells: Figure) -> None:
        """Adds a row to a table of this step; the first row's names are its columns."""
        row = {name: _plain(value) for name, value in cells.items()}
        self.tables.setdefault(table, []).append(row)
        self.say(f"{table}: " + ", ".join(f"{name} {value}" for name, value in row.items()))
        self._write()

    def check(self, name: str, passed: bool, found: str) -> None:
        """Reports whether something holds, with the figures that it was judged by."""
        self.checks.append({"name": name, "passed": bool(passed), "found": found})
        self.say(f"{'passed' if passed else 'FAILED'}: {name}: {found}")
        self._write()

    def as_json(self) -> dict[str, Any]:
        """Return all that was said."""
        return {"figures": self.figures, "tables": self.tables, "checks": self.checks}

    def _write(self) -> None:
        if self._path is not None:
            write_whole(self._path, json.dumps(self.as_json()))


@dataclass(frozen=True)
class CheckStep(Generic[S]):
    """One thing that is shown."""

    name: str
    """Lower-case words with underscores, as in `--steps`."""
    shows: str
    """One line for the page: what holds when the step passes."""
    run: Callable[[CheckedMachine, S, Report], None]
    small: S
    """Sizes for a CPU: seconds."""
    gpu: S
    """Sizes for a GPU."""
    limit_seconds: int
    """The step is killed after this long on a GPU."""
    small_limit_seconds: int = 180
    """The same for the small sizes: against hanging alone, since on a busy machine all takes many times as long."""
    needs_gpu: bool = False
    """There is nothing to show on a CPU."""
    gpu_gigabytes: float = 0
    """The smallest memory of a GPU that the sizes fit in; on a smaller one the step runs with its small sizes."""

    def sizes(self, small: bool) -> S:
        """Return the sizes to run with."""
        return self.small if small else self.gpu

    def described(self) -> dict[str, Any]:
        """Return what the runner must know, as JSON types."""
        names = ("name", "shows", "limit_seconds", "small_limit_seconds", "needs_gpu", "gpu_gigabytes")
        return {name: getattr(self, name) for name in names}


def machine_as_json(machine: CheckedMachine) -> dict[str, Any]:
    """Return what the page says of a machine."""
    stated = asdict(machine)
    for name in ("scratch", "results"):
        del stated[name]
    return stated


def write_whole(path: Path, text: str) -> None:
    """Replaces a file at once: a reader, or a kill, finds the old text or the new, never half of it."""
    half = path.with_name(f"{path.name}.{os.getpid()}.half")
    half.write_text(text)
    half.replace(path)


def _plain(value: Any) -> Figure:
    """Numbers of numpy and torch as Python's; what JSON has no number for as a word; four digits are enough to read."""
    if isinstance(value, str | bool):
        return value
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, bool | int):
        return number
    if not math.isfinite(number):
        return str(number)
    return float(f"{number:.5g}")
