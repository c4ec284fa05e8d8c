"""The code uses the terms of docs/glossary.md: each term leads to the code, retired words are not used, and class
names are unique in the project.

A retired word counts as a part of a name (`park` in `park_models`), of modules, classes, functions, parameters and
variables. Those of the second table count only as a whole name, and those of the third as words of the documentation.
"""

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.support.syntax import nodes

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs/glossary.md"
GENERATED = ("_pb2.py", "_pb2_grpc.py", "_pb2.pyi")
CODE = re.compile(r"`([^`]+)`")
NAME_FIELDS: dict[type[ast.AST], str] = {
    ast.Name: "id",
    ast.arg: "arg",
    ast.Attribute: "attr",
    **dict.fromkeys((ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler, ast.MatchAs), "name"),
}
"""Kind of node -> its attribute with the name that it may define."""


def hidden(path: Path) -> bool:
    """Return whether a path is below a folder whose name begins with a dot, such as an environment's."""
    return any(part.startswith(".") for part in path.relative_to(ROOT).parts)


@cache
def files(pattern: str) -> tuple[Path, ...]:
    """Return the files of the repository that match a glob, generated ones left out."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    paths = [ROOT / line for line in listed] or [path for path in ROOT.rglob(pattern) if not hidden(path)]
    return tuple(path for path in paths if path.is_file() and not path.name.endswith(GENERATED))


class DefinedName(NamedTuple):
    """A name that a module defines."""

    name: str
    line: int
    kind: type[ast.AST]


@cache
def definitions() -> dict[Path, list[DefinedName]]:
    """Return the names that each module of the project defines. The trees, which are millions of objects, are freed."""
    return {path: list(defined(ast.parse(path.read_text()))) for path in files("*.py")}


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading of the glossary."""
    section = GLOSSARY.read_text().split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def retired(heading: str) -> set[str]:
    """Return the words of the first column of a table."""
    return {word for row in rows(heading) for word in CODE.findall(row[0])}


def defined(tree: ast.Module) -> Iterator[DefinedName]:
    """Yield every name that a module defines."""
    for node in nodes(tree):
        field = NAME_FIELDS.get(type(node))
        if field is None or type(getattr(node, "ctx", None)) not in (ast.Store, type(None)):
            continue
        name = getattr(node, field)
        if name is not None and not (field == "name" and name.startswith("test_")):  # the names of tests are sentences
            yield DefinedName(name, node.lineno, type(node))  # type: ignore[attr-defined]


def parts(name: str) -> frozenset[str]:
    """Return the words of a name in lower case."""
    return frozenset(part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name))


def test_retired_words_are_no_part_of_a_name() -> None:
    within, whole, wrong = retired("Retired in names"), retired("Retired as whole names"), []

    @cache
    def is_retired(name: str) -> bool:
        return bool(parts(name) & within) or name.strip("_").lower() in whole

    for path, found in definitions().items():
        place = path.relative_to(ROOT)
        if parts(path.stem) & within and not path.name.startswith("test_"):
            wrong.append(f"{place}: {path.stem}")
        wrong += [f"{place}:{each.line}: {each.name}" for each in found if is_retired(each.name)]
    assert not wrong, "\n".join(wrong)


def test_retired_words_are_not_in_the_documentation() -> None:
    words, wrong = retired("Retired in prose"), []
    expression = re.compile("|".join(rf"\b{re.escape(word)}\b" for word in words), re.IGNORECASE)
    for path in files("*.md"):
        if path == GLOSSARY or "decisions" in path.parts:  # a decision is told in the words of its day
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if match := expression.search(line):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {match.group()}")
    assert not wrong, "\n".join(wrong)


def test_every_term_leads_to_the_code() -> None:
    missing = []
    for term, _, places in rows("Words"):
        for place in CODE.findall(places):
            file, _, name = place.partition(":")
            path = ROOT / file
            if not path.exists() or (name and not re.search(rf"\b{re.escape(name)}\b", path.read_text())):
                missing.append(f"{term}: {place}")
    assert not missing, "\n".join(missing)


def test_one_class_name_means_one_thing() -> None:
    places = defaultdict(list)
    for path, found in definitions().items():
        for each in found:
            if each.kind is ast.ClassDef:
                places[each.name].append(f"{path.relative_to(ROOT)}:{each.line}")
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert not twice, "\n".join(f"{name}: {', '.join(where)}" for name, where in sorted(twice.items()))
