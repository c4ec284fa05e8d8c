"""Rules of user code: names of files, modules, classes and functions that are Python's reserved words.

Rule: pure; nothing is imported or searched.
"""

import keyword
import sys
from collections.abc import Iterator
from importlib.machinery import all_suffixes
from pathlib import PurePosixPath
from typing import Any, Final

from rlhf_api.job import RLHFJobSpec
from rlhf_api.problems import Problem, Severity
from rlhf_api.rules.parts import parts

_MEMBERS: Final = frozenset({"file", "module", "name"})
"""Fields that together name user code."""
_ENGINE: Final = "spec.generation.engine"


def code_problems(spec: RLHFJobSpec) -> Iterator[Problem]:
    """Yield names that Python cannot import, and warn of names that a standard module has too."""
    for path, part in parts(spec, "spec"):
        if type(part).model_fields.keys() >= _MEMBERS:
            code: Any = part
            yield from _file(f"{path}.file", code.file)
            yield from _module(f"{path}.module", code.module, f"{path}.file")
            if keyword.iskeyword(code.name):
                yield Problem(
                    f"{path}.name", code.name, "is a keyword of Python, which names nothing: use another name"
                )
    yield from _module(_ENGINE, spec.generation.engine, "")


def _module(field: str, module: str | None, file_field: str) -> Iterator[Problem]:
    if module is None:
        return
    *packages, last = module.split(".")
    if reserved := [name for name in (*packages, last) if keyword.iskeyword(name)]:
        message = f"is no importable module, as {reserved[0]} is a keyword of Python: rename that package or module"
        yield Problem(field, module, message)
    elif packages and f".{last}" in all_suffixes():
        remedy = f"give it as {file_field}, or leave out .{last}" if file_field else f"leave out .{last}"
        yield Problem(field, module, f"names a file, and must be a module, such as {'.'.join(packages)}: {remedy}")
    elif file_field and module.partition(".")[0] in sys.stdlib_module_names:
        message = (
            "is a module of Python itself, which Python finds before yours: rename yours, unless Python's is intended"
        )
        yield Problem(field, module, message, severity=Severity.WARNING)


def _file(field: str, file: str | None) -> Iterator[Problem]:
    if file is None or "://" in file:  # a rule of paths rejects an address
        return
    path = PurePosixPath(file)
    if file.endswith("/") or path.suffix not in all_suffixes():
        yield Problem(field, file, "must be a Python file, whose name ends in .py")
    elif path.stem in sys.stdlib_module_names:
        message = f"hides Python's own module {path.stem} from all code of the process: rename the file"
        yield Problem(field, file, message, severity=Severity.WARNING)
