"""The tree of tests mirrors the packages; shared code is in tests/support or in the test cluster."""

import ast
import re
from pathlib import Path

from tests.support.syntax import nodes

ROOT = Path(__file__).parents[2]
MODULES = sorted(path.relative_to(ROOT) for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
PACKAGES = {path.name.removeprefix("rlhf_"): path for path in ROOT.glob("*/rlhf_*") if (path / "__init__.py").exists()}


def imported(text: str) -> set[str]:
    """Return the last parts of the names of all modules that a module imports, and of the names that it imports from
    them."""
    result: set[str] = set()
    for node in nodes(ast.parse(text)):
        if isinstance(node, ast.Import):
            result |= {alias.name.rpartition(".")[2] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            result |= {(node.module or "").rpartition(".")[2], *(alias.name for alias in node.names)}
    return result


def test_nobody_imports_a_test_or_a_conftest() -> None:
    tests = {module.stem for module in MODULES if module.stem.startswith("test_")} | {"conftest"}
    texts = {str(module): (ROOT / module).read_text() for module in MODULES}
    # Most modules name no test at all, and needn't be parsed.
    naming = {module: text for module, text in texts.items() if not tests.isdisjoint(re.findall(r"\w+", text))}
    wrong = {module: names for module, text in naming.items() if (names := imported(text) & tests)}
    assert wrong == {}, "move what they share to tests/support"


def test_folders_of_unit_tests_are_those_of_the_packages() -> None:
    names = {
        path.name for path in (ROOT / "tests" / "unit").iterdir() if path.is_dir() and not path.name.startswith("_")
    }
    assert names == set(PACKAGES)
    for name, package in PACKAGES.items():
        folders = {path for path in (ROOT / "tests" / "unit" / name).iterdir() if any(path.glob("test_*.py"))}
        strange = {path.name for path in folders if not (package / path.name).is_dir()}
        assert strange == set(), f"tests/unit/{name} has folders that {package.name} has not"
