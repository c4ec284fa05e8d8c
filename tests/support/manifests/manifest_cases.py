"""The table of invalid manifests as texts; also run against a real API server, so it does not import pytest."""

import copy
import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
TABLES = Path(__file__).parent / "manifest_tables"
EXAMPLES = ROOT / "examples"


def _table(name: str) -> list[dict[str, Any]]:
    """Return the rows of a table."""
    return list(yaml.load((TABLES / f"{name}.yaml").read_text(), Loader=yaml.CSafeLoader))


@dataclass(frozen=True)
class Case:
    """A manifest that must be refused, with all its problems."""

    name: str
    text: str
    problems: tuple[dict[str, Any], ...]
    cluster_accepts: bool
    whole_text: bool
    """Whether the text is no manifest at all, so that kubectl refuses it before the API server sees it."""


def invalid_cases() -> list[Case]:
    """Return the table in `invalid.yaml`."""
    table = _table("invalid")
    return [
        Case(
            row["name"],
            row["text"] if "text" in row else changed(row["from"], row.get("set", {}), row.get("unset", [])),
            tuple(row["problems"]),
            row.get("cluster") == "accepts",
            "text" in row,
        )
        for row in table
    ]


@dataclass(frozen=True)
class Verdict:
    """A file and the verdict on it in a cluster."""

    name: str
    text: str
    verdict: str
    """valid, invalid or warning."""
    field: str
    """Field that the problem or warning names."""


def verdicts() -> list[Verdict]:
    """Return the table in `verdicts.yaml`."""
    table = _table("verdicts")
    return [Verdict(row["name"], _text(row), row["verdict"], row.get("field", "")) for row in table]


def _text(row: dict[str, Any]) -> str:
    if "file" in row:
        return Path(EXAMPLES / row["file"]).read_text()
    if isinstance(row.get("text"), list):
        return "---\n".join(_text(item) for item in row["text"])
    put, drop = dict(row.get("set", {})), list(row.get("unset", []))
    if "template" in row:
        put[f"spec.{row.get('of', 'generation')}.template"] = row["template"]
    return _DEEP.sub(_nested, changed(row.get("from", "ppo"), put, drop))


_DEEP = re.compile(r"\bDEEP-(\d+)\b")
"""Placeholder for a number of nested mappings."""


def _nested(found: re.Match[str]) -> str:
    levels = int(found[1])
    return "{a: " * levels + "end" + "}" * levels


@dataclass(frozen=True)
class Pair:
    """Two manifests on either side of a rule, which differ only in what the rule is about."""

    name: str
    holds: str
    breaks: str


def rule_pairs() -> list[Pair]:
    """Return the table in `rule_pairs.yaml`."""
    rows = _table("rule_pairs")
    about = [(row, {*row.get("set", ()), *row.get("unset", ()), *row["holds"], *row["breaks"]}) for row in rows]
    rows += [_of_costs(row) for row, paths in about if all(map(_is_of_reward, paths)) and not row.get("unset")]
    return [
        Pair(
            f"{row['from']}: {', '.join(row['breaks'] or row['holds'])}",
            *(changed(row["from"], row.get("set", {}) | row[side], row.get("unset", [])) for side in SIDES),
        )
        for row in rows
    ]


SIDES = ("holds", "breaks")


def _is_of_reward(path: str) -> bool:
    return path == "spec.models.reward" or path.startswith("spec.models.reward.")


def _of_costs(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row for a cost, which has the same fields as a reward."""
    parts = {side: row.get(side, {}) for side in ("set", *SIDES)}
    costs = {
        side: {
            path.replace(".reward", ".cost", 1) if _is_of_reward(path) else path: value for path, value in put.items()
        }
        for side, put in parts.items()
    }
    costs["set"] = {"spec.models.cost": {"function": {"file": "cost.py"}}, **costs["set"]}
    return {**row, **costs}


def changed(example: str, put: dict[str, Any], drop: list[str]) -> str:
    """Return an example's text with fields removed, then set."""
    return str(yaml.dump(changed_data(example, put, drop), Dumper=yaml.CSafeDumper, sort_keys=False))


def changed_data(example: str, put: dict[str, Any], drop: list[str]) -> dict[str, Any]:
    """Return the data of an example with fields removed, then set."""
    data = copy.deepcopy(_example(example))
    for path in drop:
        parent, name = _parent(data, path)
        parent.pop(name, None)
    for path, value in put.items():
        parent, name = _parent(data, path)
        parent[name] = copy.deepcopy(value)
    return data


@functools.cache
def _example(name: str) -> dict[str, Any]:
    text = (EXAMPLES / f"{name}.yaml").read_text().replace("1e-6", "1.0e-6").replace("5e-6", "5.0e-6")
    return dict(yaml.load(text, Loader=yaml.CSafeLoader))


def _parent(data: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
    *around, name = path.split(".")
    for item in around:
        data = data.setdefault(item, {})
    return data, name
