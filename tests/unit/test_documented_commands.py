"""A test runs every command of the documentation or gives a reason not to, with the page's own input."""

import re
import shlex

import pytest
from tests.support.jobs.documented_commands import (
    ROOT,
    SHELL_FENCES,
    DocumentedCommand,
    documented_commands,
    pages,
    parse_rlhf,
    register,
)

COMMANDS = documented_commands()
each_command = pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.page}: {command.text}")


def test_there_are_commands_and_all_of_them_are_read() -> None:
    assert len(COMMANDS) > 70
    for page in pages():
        assert not SHELL_FENCES.findall(page.read_text()), f"{page}: write ```sh, which this test reads"


@each_command
def test_a_command_is_run_by_a_test_or_says_why_not(command: DocumentedCommand) -> None:
    entries = [entry for entry in register() if entry.holds(command)]
    assert len(entries) == 1, f"{len(entries)} entries of tests/support/jobs/documented_commands.yaml match"
    [entry] = entries
    assert bool(entry.run_by) != bool(entry.not_run), "an entry says either who runs it or why nobody does"
    if entry.run_by:
        verb = command.text.split()[1]
        assert entry.shows.replace("{verb}", verb) in (ROOT / entry.run_by).read_text(), entry.run_by


def test_no_entry_is_left_over() -> None:
    unused = [entry for entry in register() if not any(entry.holds(command) for command in COMMANDS)]
    assert not unused


@each_command
def test_programs_options_targets_and_files_are_there(command: DocumentedCommand) -> None:
    for part in re.split(r" (?:&&|\|) ", command.text):
        program, *arguments = [word for word in shlex.split(part) if not re.match(r"[A-Z_]+=", word)]  # settings
        if program == "rlhf":
            parse_rlhf(arguments)
        if program == "make":
            targets = (ROOT / "Makefile").read_text() + (ROOT / "images" / "images.mk").read_text()
            assert all(re.search(rf"^([\w-]+ )*{target}( [\w-]+)*:", targets, re.MULTILINE) for target in arguments)
        for word in (program, *arguments):
            if word.startswith(("examples/", "scripts/", "tests/", "charts/", "benchmarks/")):
                assert (ROOT / word).exists(), word
