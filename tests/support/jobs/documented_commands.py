"""Every command of the documentation, and the register of the tests that run them.

A command is a line of a fenced block `sh` in README, CONTRIBUTING or docs/, without its comment; a backslash at the end
of a line continues it. Decision pages are excluded, because they contain arguments rather than instructions.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import typer
import yaml
from typer.core import TyperGroup

from rlhf_cli.main import app

ROOT: Final = Path(__file__).resolve().parents[3]
REGISTER: Final = Path(__file__).with_suffix(".yaml")
_BLOCK: Final = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL_FENCES: Final = re.compile(r"^\s*```(bash|console|shell|zsh)\b", re.MULTILINE)
"""Blocks that this module would not read: the documentation uses ```sh."""


@dataclass(frozen=True)
class DocumentedCommand:
    """One documented command line."""

    page: str
    text: str


@dataclass(frozen=True)
class Entry:
    """The test of all commands that match a pattern, or the reason why there is none."""

    pattern: re.Pattern[str]
    pages: str
    """Pages of the commands: a prefix of the page's path."""
    run_by: str = ""
    """Test file, or path of CI, that runs them."""
    shows: str = ""
    """Part of the command that the file must contain; empty if the file runs commands of this register."""
    not_run: str = ""
    """Reason why no test runs them."""

    def holds(self, command: DocumentedCommand) -> bool:
        """Return whether this entry covers a command."""
        return command.page.startswith(self.pages) and self.pattern.fullmatch(command.text) is not None


def pages() -> list[Path]:
    """Return the pages with commands."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if ROOT / "docs" / "decisions" not in page.parents]


def documented_commands() -> list[DocumentedCommand]:
    """Return all commands, in the order of pages and lines."""
    return [
        DocumentedCommand(str(page.relative_to(ROOT)), line)
        for page in pages()
        for block in _BLOCK.findall(page.read_text())
        for line in _lines(block)
    ]


def register() -> list[Entry]:
    """Return the entries of documented_commands.yaml."""
    return [
        Entry(re.compile(item.pop("command")), item.pop("pages", ""), **item)
        for item in yaml.safe_load(REGISTER.read_text())
    ]


def parse_rlhf(arguments: Sequence[str]) -> None:
    """Parse the arguments of `rlhf`; raises for an unknown option."""
    verb, rest = verb_of(arguments)
    verb.make_context(verb.name, rest)


def verb_of(arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """Return the verb of `rlhf`, below its group if it has one, and the remaining arguments. Raises KeyError for no
    verb.
    """
    verb: Any = typer.main.get_command(app)
    rest = list(arguments)
    while isinstance(verb, TyperGroup):
        verb = verb.commands[rest.pop(0)]
    return verb, rest


def _lines(block: str) -> list[str]:
    whole = block.replace("\\\n", " ").splitlines()
    texts = [re.sub(r"\s+", " ", re.sub(r"(^|\s)#.*$", "", line)).strip() for line in whole]
    return [text for text in texts if text]
