"""The results of one run, each step's status and measurements, as one JSON file and one page.

Owns both files. The command and the pytest process of a step write the JSON file in turn, as a whole each time, so
that a kill at any moment preserves the measurements. Must never import more than the standard library.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

JSON_FILE, PAGE_FILE, LOG_FILE = "gpu-check.json", "gpu-check.md", "gpu-check.log"
PASSED, FAILED, NOT_HERE, LEFT_OUT, RUNNING = "passed", "failed", "not here", "left out", "running"


class Results:
    """Results of a run so far, as stored in the JSON file of a folder."""

    def __init__(self, folder: Path, about: Mapping[str, Any] | None = None) -> None:
        """Read the existing results; with `about` (source, machine, command) start a new run."""
        self.folder = folder
        self.content: dict[str, Any] = {**about, "steps": {}} if about else json.loads((folder / JSON_FILE).read_text())

    @property
    def steps(self) -> dict[str, dict[str, Any]]:
        """The steps by name, in the order in which they ran."""
        steps: dict[str, dict[str, Any]] = self.content["steps"]
        return steps

    def put(self, name: str, status: str, why: str, seconds: float, **said: Any) -> None:
        """Set the values of a step and write the JSON file; empty values of `said` are omitted."""
        about = {part: value for part, value in said.items() if value}
        self.steps[name] = {"status": status, "why": why, "seconds": round(seconds, 1)} | about
        self.write()

    def write(self) -> None:
        """Write the JSON file."""
        write_whole(self.folder / JSON_FILE, json.dumps(self.content, indent=1) + "\n")

    def write_page(self) -> None:
        """Write the page."""
        write_whole(self.folder / PAGE_FILE, page_of(self.content))


def write_whole(path: Path, text: str) -> None:
    """Replace a file atomically: readers see the old or the new text, even after a kill."""
    half = path.with_name(f"{path.name}.half")
    half.write_text(text)
    half.replace(path)


def page_of(results: Mapping[str, Any]) -> str:
    """Return the page in Markdown."""
    machine = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items())
    ended = [step["status"] for step in results["steps"].values()]
    lines = [
        f"# gpu-check of {results['started']}",
        "",
        f"- Machine: {machine.get('name', 'unknown')}, {machine.get('memory_bytes', 0) / 1e9:.0f} GB, "
        f"{machine.get('gpus', 0)} GPUs, {machine.get('cores', 0)} cores; steps ran on "
        f"`{machine.get('device', 'unknown')}`" + (" with their small sizes" if results["small"] else ""),
        f"- Source: {results['source']}",
        f"- Versions: {versions}",
        f"- Took {results['seconds']:.0f} s in all; {', '.join(f'{ended.count(s)} {s}' for s in dict.fromkeys(ended))}",
        "",
        *_table(["step", "shows", "ended", "seconds"], [_ended(name, step) for name, step in results["steps"].items()]),
    ]
    for name, step in results["steps"].items():
        lines += [line for part in _parts(name, step) for line in ("", *part)]
    return "\n".join(lines) + "\n"


def _ended(name: str, step: Mapping[str, Any]) -> list[str]:
    status = f"**{FAILED.upper()}**" if step["status"] == FAILED else step["status"]
    why = f": {step['why']}" if step["why"] else ""
    return [f"`{name}`", step.get("shows", ""), f"{status}{why}", f"{step['seconds']:.0f}"]


def _parts(name: str, step: Mapping[str, Any]) -> list[list[str]]:
    checks, figures = step.get("checks", []), step.get("figures", {})
    parts = [[f"- {PASSED if c['passed'] else '**FAILED**'}: {c['name']}: {c['found']}" for c in checks]]
    cells = [[figure, str(found["value"]), str(found["unit"])] for figure, found in figures.items()]
    parts += [_table(["figure", "value", "unit"], cells)] if cells else []
    for table, rows in step.get("tables", {}).items():
        columns = list(dict.fromkeys(column for row in rows for column in row))
        cells = [[str(row.get(column, "")) for column in columns] for row in rows]
        parts += [[f"{table}:"], _table(columns, cells)]
    parts = [part for part in parts if part]
    return [[f"## {name}"], *parts] if parts else []


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return lines + [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
