"""`rlhf validate job.yaml`: every problem of every RLHFJob in a file at once, one paragraph each; starts nothing.

Rule: it says what the API server and the operator would say, from the same models, rules and checks; it never fixes
anything and never looks at models, prompts or devices. What pods are made of (templates, where checkpoints lie) is
judged for a cluster, and left out for `rlhf run`, which makes none. A warning is no problem: the exit code is that of a
valid manifest. With `--json` the last line is one object for programs.
"""

import json
from enum import StrEnum
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from rlhf_api.job import RLHFJob
from rlhf_api.manifest import Examined, ManifestError, Problem, examine, placed, readable, resolve
from rlhf_api.names import ExitCode, Group
from rlhf_api.problems import Severity
from rlhf_cli.console import output
from rlhf_operator.manifests.checks import problems_of_pods

_PODS_ROOT = Path("/")
"""In a pod there is no manifest that a path could be relative to."""


class Target(StrEnum):
    """Where the jobs are to run."""

    CLUSTER = "cluster"
    LOCAL = "local"


def validate(
    path: Path, *, target: Target = Target.CLUSTER, as_json: bool = False, console: Console | None = None
) -> int:
    """Check a file and print the findings; ExitCode.OK, or ExitCode.USAGE when there are problems."""
    console = console or output()
    try:
        found = judged(readable(path), target)
    except ManifestError as error:
        if as_json:
            problems = [each.as_dict() for each in error.problems]
            _print_json(console, {"path": str(path), "valid": False, "documents": [], "problems": problems})
        else:
            print_problems(error, console)
        return ExitCode.USAGE
    if as_json:
        _print_json(console, _report(path, found))
    else:
        for each in found:
            _print(console, path, each, several=len(found) > 1)
    return ExitCode.USAGE if any(_errors(each) for each in found) else ExitCode.OK


def judged(text: str, target: Target = Target.CLUSTER) -> list[Examined]:
    """Every document of a text with everything that is wrong with it. Raises ManifestError for what is no YAML, and
    where there is no RLHFJob at all.
    """
    found = examine(text)
    if all(each.other for each in found):
        listed = ", ".join(each.named for each in found)
        raise ManifestError([Problem("", None, f"the file holds no RLHFJob: it has {listed}")])
    return [each if each.job is None else _with_pods(each, each.job, target) for each in found]


def print_problems(error: ManifestError, console: Console) -> None:
    """A heading, then a paragraph a problem: field and line, the value given, what would be right."""
    _print_heading(console, error.source, error.problems)
    _print_paragraphs(console, error.problems)


def _with_pods(examined: Examined, job: RLHFJob, target: Target) -> Examined:
    if target is Target.LOCAL:
        return examined
    found = [placed(each, examined.document) for each in problems_of_pods(resolve(job, _PODS_ROOT))]
    return Examined(examined.index, examined.document, job, [*found, *examined.problems])


def _errors(examined: Examined) -> list[Problem]:
    return [each for each in examined.problems if each.severity is not Severity.WARNING]


def _print(console: Console, path: Path, examined: Examined, *, several: bool) -> None:
    source = f"{path}, document {examined.index} ({examined.named})" if several else str(path)
    if examined.other:
        console.print(Text.assemble(("not checked", "dim"), f"  {source}"))
        return
    if _errors(examined):
        _print_heading(console, source, _errors(examined))
    else:
        assert examined.job is not None
        console.print(Text.assemble(("valid", "bold green"), f"  {source}: {_summary(examined.job)}"))
    _print_paragraphs(console, examined.problems)
    if several:
        console.print()


def _print_heading(console: Console, source: str, problems: list[Problem]) -> None:
    count = f"{len(problems)} problem{'' if len(problems) == 1 else 's'}"
    console.print(Text.assemble(("invalid", "bold red"), f"  {source}: {count}"))


def _print_paragraphs(console: Console, problems: list[Problem]) -> None:
    for problem in problems:
        line = f"  line {problem.line}" if problem.line is not None else ""
        warning = "warning  " if problem.severity is Severity.WARNING else ""
        console.print()
        console.print(Text.assemble((warning, "yellow"), (problem.field or "the file", "bold"), (line, "dim")))
        if problem.shown_value:
            console.print(Padding(Text.assemble(("given  ", "dim"), problem.shown_value), (0, 0, 0, 2), expand=False))
        console.print(Padding(Text(problem.message), (0, 0, 0, 2), expand=False))


def _report(path: Path, found: list[Examined]) -> dict[str, object]:
    """`problems` are those of all documents, each with its document's index."""
    return {
        "path": str(path),
        "valid": not any(_errors(each) for each in found),
        "documents": [
            {"index": each.index, "object": each.named, "checked": not each.other, "valid": not _errors(each)}
            for each in found
        ],
        "problems": [{"document": each.index} | problem.as_dict() for each in found for problem in each.problems],
    }


def _print_json(console: Console, report: dict[str, object]) -> None:
    # Not through console.print, which would wrap and colour it.
    console.file.write(json.dumps(report, default=str) + "\n")


def _summary(job: RLHFJob) -> str:
    spec = job.spec
    workers = (
        f"{spec.generation.replicas} generation, {spec.inference.replicas} inference, {spec.training.ranks} training"
    )
    if spec.rank_group is not Group.TRAINING:
        workers += f" ranks in {spec.rank_group} workers"
    told = f"{job.name}, {spec.algorithm.name}, {spec.iterations} iterations, workers: {workers}"
    if spec.operator_class:
        told += f"; only an operator with --operator-class={spec.operator_class} reconciles it"
    return told
