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
    """Return several runs as one, for what one budget was too short for; of runs of several sources each step names its
    own, and a version that differs is named with the others. ValueError when they are not of one machine."""
    first, sources, steps = dict(runs[0]), {run["source"] for run in runs}, dict[str, Any]()
    for run in runs:
        for part, own, known in [("small", run["small"], first["small"]), ("machine", _bare(run), _bare(first))]:
            if own != known:
                raise ValueError(f"{part} differs: {known} and {own}; write a page of each")
        source = {} if len(sources) == 1 else {"source": f"{run['source']}, {run['started']}"}
        named = {name: step | source for name, step in run["steps"].items()}
        steps |= {name: step for name, step in named.items() if step["status"] != "left out" or name not in steps}
    several = {} if len(sources) == 1 else {"source": "several: each step names its own"}
    versions: dict[str, list[str]] = {}
    for run in runs:
        for name, version in run["machine"].get("versions", {}).items():
            versions.setdefault(name, []).append(version)
    all_versions = {name: " or ".join(dict.fromkeys(found)) for name, found in versions.items()}
    machine = first["machine"] | {"versions": all_versions}
    return first | several | {"machine": machine, "steps": steps, "seconds": sum(run["seconds"] for run in runs)}


def _bare(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's machine without the versions of its libraries."""
    return {name: value for name, value in run["machine"].items() if name != "versions"}


def put_into(document: str, page: str) -> str:
    """Return a document with the page between its markers. ValueError when the markers are not there once, in order."""
    before, begin, rest = document.partition(BEGIN)
    old, end, after = rest.partition(END)
    if not begin or not end or BEGIN in old + after:
        raise ValueError(f"the document must have the lines {BEGIN} and {END} once, in this order")
    return f"{before}{begin}\n\n{page}\n{end}{after}"


def _step(step: Mapping[str, Any]) -> list[str]:
    parts: list[list[str]] = []
    if step.get("source"):
        parts.append([f"Source: {step['source']}."])
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
