"""Finds sentences and names that are not plain English, by constructs that syntax shows.

Owns the list of constructs and of the folders whose sentences are free of them. It must never change a file.
`plain_english.py` checks the sentences of PLAIN and the names of NAMED; `plain_english.py PATH ...` checks both below
the paths.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

PLAIN: Final = (
    "api", "benchmarks", "cli", "common", "coordinator", "docs", "examples", "observability", "operator", "planner",
    "scripts", "tests", "workers", "CONTRIBUTING.md", "README.md",
)  # fmt: skip
"""Files and folders whose sentences are plain."""
NAMED: Final = (
    "api", "benchmarks", "cli", "common", "coordinator", "examples", "observability", "operator", "planner", "scripts",
    "tests", "workers",
)  # fmt: skip
"""Folders whose names are plain, as pathspecs of git."""
OPENING: Final = re.compile(r"(?:^|(?<=[.:;!?])\s+|\n\s*\n\s*)(Of|As|By|What|Whose|That which)\s(?![^.]*\?)")
PHRASE: Final = re.compile(r"\b(?:is|are) (?:told|said)\b|\b(?:whatever|nobody|none but|that which)\b", re.IGNORECASE)
NAMES: Final = frozenset({"what", "one", "held", "kept", "made", "given", "known"})
FUNCTIONS: Final = NAMES | {"of", "again", "together", "behind"}
GENERATED: Final = ("_pb2.py", "_pb2_grpc.py", "docs/reference.md", "docs/metrics.md")
FENCE: Final = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield every docstring of a module, including attribute docstrings, with its line."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield every meaningless name of a function, argument or variable, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name.strip("_") in FUNCTIONS:
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) if name in NAMES:
                yield node.lineno, name


def paragraphs(page: str) -> Iterator[tuple[int, str]]:
    """Yield the prose lines of a Markdown page, with their numbers."""
    prose = FENCE.sub(lambda block: "\n" * block[0].count("\n"), page)
    for number, line in enumerate(prose.splitlines(), 1):
        if not line.startswith(("|", "#")):
            yield number, line.strip("-* ")


def prose_findings(path: Path, text: str, tree: ast.Module | None) -> Iterator[str]:
    """Yield the findings in the prose of a file, as `path:line: ...`."""
    for line, prose in texts(tree) if tree else paragraphs(text):
        for match in (*OPENING.finditer(prose), *PHRASE.finditer(prose)):
            place = line + prose.count("\n", 0, match.end())
            yield f"{path}:{place}: {match[0].strip()!r}: write subject, verb, object"


def findings(path: Path, *, with_names: bool) -> Iterator[str]:
    """Yield the findings of a file, as `path:line: ...`."""
    text = path.read_text()
    tree = ast.parse(text) if path.suffix == ".py" else None
    yield from prose_findings(path, text, tree)
    for line, name in names(tree) if tree and with_names else ():
        yield f"{path}:{line}: the name {name!r} says nothing; name the thing or the action"


def tracked(pathspecs: Iterable[str]) -> list[Path]:
    """Return the tracked Python files and pages that match, without the generated ones."""
    command = ["git", "ls-files", *pathspecs]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    files = [Path(name) for name in listed if name.endswith((".py", ".md")) and not name.endswith(GENERATED)]
    return [file for file in files if file.is_file()]


def main(paths: list[str]) -> int:
    """Print all findings; return the exit status."""
    named = frozenset(tracked(paths or NAMED))
    files = tracked(paths or PLAIN)
    found = [finding for path in files for finding in findings(path, with_names=path in named)]
    print(*found, sep="\n", end="\n" if found else "")
    return min(len(found), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
