"""`rlhf validate job.yaml`: every problem of a manifest at once, one paragraph each; starts nothing.

Rule: it says what the API server and the operator would say, from the same models and rules; it never fixes anything
and never looks at models, prompts or devices. With `--json` the last line is one object for programs.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from rlhf_api.job import RLHFJob
from rlhf_api.manifest import ManifestError, Problem, load
from rlhf_api.names import ExitCode, Group


def validate(path: Path, *, as_json: bool = False, console: Console | None = None) -> int:
    """Check a manifest and print the findings; ExitCode.OK, or ExitCode.USAGE when there are problems."""
    console = console or Console()
    try:
        job = load(path)
    except ManifestError as error:
        if as_json:
            _print_json(console, path, error.problems)
        else:
            print_problems(error, console)
        return ExitCode.USAGE
    if as_json:
        _print_json(console, path, [])
    else:
        console.print(Text.assemble(("valid", "bold green"), f"  {path}: {_summary(job)}"))
    return ExitCode.OK


def print_problems(error: ManifestError, console: Console) -> None:
    """A heading, then a paragraph a problem: field and line, the value given, what would be right."""
    count = len(error.problems)
    heading = f"  {error.source}: {count} problem{'' if count == 1 else 's'}"
    console.print(Text.assemble(("invalid", "bold red"), heading))
    for problem in error.problems:
        line = f"  line {problem.line}" if problem.line is not None else ""
        console.print()
        console.print(Text.assemble((problem.field or "the file", "bold"), (line, "dim")))
        if problem.shown_value:
            console.print(Padding(Text.assemble(("given  ", "dim"), problem.shown_value), (0, 0, 0, 2), expand=False))
        console.print(Padding(Text(problem.message), (0, 0, 0, 2), expand=False))


def _print_json(console: Console, path: Path, problems: Sequence[Problem]) -> None:
    report = {"path": str(path), "valid": not problems, "problems": [problem.as_dict() for problem in problems]}
    # Not through console.print, which would wrap and colour it.
    console.file.write(json.dumps(report, default=str) + "\n")


def _summary(job: RLHFJob) -> str:
    spec = job.spec
    workers = (
        f"{spec.generation.replicas} generation, {spec.inference.replicas} inference, {spec.training.ranks} training"
    )
    if spec.rank_group is not Group.TRAINING:
        workers += f" ranks in {spec.rank_group} workers"
    return f"{job.name}, {spec.algorithm.name}, {spec.iterations} iterations, workers: {workers}"
