"""The readable page of a run, and its place in docs/gpu.md.

Rule: a pure function of the JSON file, so the page can be written again from it at any time.
"""

from collections.abc import Mapping, Sequence
from typing import Any

BEGIN = "<!-- measured: written by `scripts/gpu-check page gpu-check.json`, not by hand -->"
END = "<!-- end of measured -->"


def page_of(results: Mapping[str, Any], level: int = 1) -> str:
    """Return the page in Markdown; `level`: of its topmost heading."""
    title, heading = "#" * level, "#" * (level + 1)
    machine = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items())
    gigabytes = machine.get("memory_bytes", 0) / 1e9
    lines = [
        f"{title} gpu-check of {results['started']}",
        "",
        f"- Machine: {machine.get('name', 'unknown')}, {gigabytes:.0f} GB, {machine.get('gpus', 0)} GPUs, "
        f"{machine.get('cores', 0)} cores; steps ran on `{machine.get('device', 'unknown')}`"
        + (" with their small sizes" if results["small"] else ""),
        f"- Source: {results['source']}",
        f"- Versions: {versions}",
        f"- Took {results['seconds']:.0f} s in all; {_counts(results['steps'])}",
        "",
        *_table(
            ["step", "shows", "ended", "seconds"],
            [[f"`{n}`", s.get("shows", ""), _ended(s), f"{s['seconds']:.0f}"] for n, s in results["steps"].items()],
        ),
    ]
    for name, step in results["steps"].items():
        if any(step.get(part) for part in ("figures", "tables", "checks")):
            lines += ["", f"{heading} {name}", "", *_step(step)]
    return "\n".join(lines) + "\n"


def merged(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return several runs as one, for what one budget was too short for. ValueError when they are not of one machine
    and one source."""
    first = dict(runs[0])
    steps: dict[str, Any] = {}
    for run in runs:
        for part in ("source", "machine", "small"):
            if run[part] != first[part]:
                raise ValueError(f"{part} differs: {first[part]} and {run[part]}; write a page of each")
        steps |= {
            name: step for name, step in run["steps"].items() if step["status"] != "left out" or name not in steps
        }
    return first | {"steps": steps, "seconds": sum(run["seconds"] for run in runs)}


def put_into(document: str, page: str) -> str:
    """Return a document with the page between its markers. ValueError when the markers are not there once, in order."""
    before, begin, rest = document.partition(BEGIN)
    old, end, after = rest.partition(END)
    if not begin or not end or BEGIN in old + after:
        raise ValueError(f"the document must have the lines {BEGIN} and {END} once, in this order")
    return f"{before}{begin}\n\n{page}\n{end}{after}"


def _step(step: Mapping[str, Any]) -> list[str]:
    parts: list[list[str]] = []
    if step.get("checks"):
        parts.append(
            [f"- {'passed' if c['passed'] else '**FAILED**'}: {c['name']}: {c['found']}" for c in step["checks"]]
        )
    if step.get("figures"):
        figures = step["figures"].items()
        parts.append(_table(["figure", "value", "unit"], [[n, str(f["value"]), str(f["unit"])] for n, f in figures]))
    for name, rows in step.get("tables", {}).items():
        columns = list(dict.fromkeys(column for row in rows for column in row))
        cells = [[str(row.get(column, "")) for column in columns] for row in rows]
        parts.append([f"{name}:", "", *_table(columns, cells)])
    return [line for index, part in enumerate(parts) for line in ([""] if index else []) + part]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return lines + [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]


def _ended(step: Mapping[str, Any]) -> str:
    status = step["status"]
    shown = f"**{status.upper()}**" if status == "failed" else status
    return f"{shown}: {step['why']}" if step["why"] else shown


def _counts(steps: Mapping[str, Any]) -> str:
    counts: dict[str, int] = {}
    for step in steps.values():
        counts[step["status"]] = counts.get(step["status"], 0) + 1
    return ", ".join(f"{count} {status}" for status, count in counts.items())
