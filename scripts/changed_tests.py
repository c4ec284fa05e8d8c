"""Run the tests, of both tiers, that import a Python module that changed in the working tree.

Usage: `python scripts/changed_tests.py [--since REVISION] [--print] [PYTEST ARGUMENTS]`. grimp reads the imports, as
in import-linter. A test that starts a process does not import the code of that process: `make test-all` covers it.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    "",
    "common",
    "api",
    "planner",
    "coordinator",
    "operator",
    "cli",
    "workers",
    "observability",
    "scripts",
    "examples",
)
"""Folders that modules are imported from."""


def main() -> None:
    """Print the test files and run them; the exit code is that of pytest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", default="HEAD", help="compare with this revision (default: HEAD)")
    parser.add_argument("--print", action="store_true", help="only print the test files")
    options, arguments = parser.parse_known_args()
    files = importing_tests(changed_modules(options.since))
    print("\n".join(files) or "no test imports what changed", flush=True)
    if files and not options.print:
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-m", "pytest", *files, *arguments])


def changed_modules(since: str) -> set[str]:
    """Return the names of modules that differ from a revision, including untracked ones."""
    names = _git("diff", "--name-only", since) + _git("ls-files", "--others", "--exclude-standard")
    return {module for name in names if name.endswith(".py") for module in _module_names(Path(name))}


def importing_tests(changed: set[str]) -> list[str]:
    """Return the files of tests that are changed, or that import a changed module directly or indirectly."""
    sys.path[:0] = [str(ROOT / folder) for folder in FOLDERS]
    products = [path.parent.name for folder in FOLDERS[1:] for path in (ROOT / folder).glob("*/__init__.py")]
    tests = [f"tests.{path.name}" for path in (ROOT / "tests").iterdir() if _has_modules(path)]
    graph = grimp.build_graph(*products, *tests)
    affected = {module for name in changed & graph.modules for module in (name, *graph.find_downstream_modules(name))}
    return sorted(
        module.replace(".", "/") + ".py" for module in affected if module.rpartition(".")[2].startswith("test_")
    )


def _has_modules(folder: Path) -> bool:
    return folder.is_dir() and any(folder.rglob("*.py"))


def _module_names(path: Path) -> set[str]:
    """Return the names by which a file may be imported."""
    parts = path.with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return {".".join(parts[1:])} if parts[0] in FOLDERS else {".".join(parts)}


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


if __name__ == "__main__":
    main()
