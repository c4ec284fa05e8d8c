"""`rlhf validate job.yaml`: print the problems of the RLHFJobs in a file; start nothing.

Rule: it uses the models, rules and checks of the operator. For a cluster it also checks pod templates, for `rlhf run`
the files of this machine. Warnings do not change the exit code.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from rlhf_api.algorithms import graph_of
from rlhf_api.job import RLHFJob
from rlhf_api.manifest import read_text
from rlhf_api.problems import ManifestError, Problem, Severity
from rlhf_cli.console import output
from rlhf_cli.load_job import LoadedJob, Target, load_documents
from rlhf_common.names import ExitCode, Group


def validate(
    path: Path, *, target: Target = Target.CLUSTER, as_json: bool = False, console: Console | None = None
) -> int:
    """Check a file and print its problems. Return ExitCode.OK, or ExitCode.USAGE when there are errors."""
    console = console or output()
    try:
        documents = load_documents(read_text(path), target, path.absolute().parent)
    except ManifestError as error:
        if as_json:
            problems = [problem.as_dict() for problem in error.problems]
            _print_json(console, {"path": str(path), "valid": False, "documents": [], "problems": problems})
        else:
            print_problems(ManifestError(error.problems, str(path)), console)
        return ExitCode.USAGE
    if as_json:
        _print_json(console, _report(path, documents))
    else:
        for index, loaded in enumerate(documents, 1):
            several = f"{path}, document {index} ({loaded.name})"
            _print_document(console, several if len(documents) > 1 else str(path), loaded)
            if len(documents) > 1 and not loaded.of_another_kind:
                console.print()
    return ExitCode.USAGE if any(loaded.errors for loaded in documents) else ExitCode.OK


def print_problems(error: ManifestError, console: Console) -> None:
    """Print a heading, then one paragraph per problem: field and line, the given value, and the valid values."""
    _print_heading(console, error.source, error.problems)
    _print_paragraphs(console, error.problems)


def _print_document(console: Console, source: str, loaded: LoadedJob) -> None:
    if loaded.of_another_kind:
        console.print(Text.assemble(("not checked", "dim"), f"  {source}"))
        return
    if loaded.errors:
        _print_heading(console, source, loaded.errors)
    else:
        assert loaded.job is not None
        console.print(Text.assemble(("valid", "bold green"), f"  {source}: {_summary(loaded.job)}"))
    _print_paragraphs(console, loaded.problems)


def _print_heading(console: Console, source: str, problems: Sequence[Problem]) -> None:
    count = f"{len(problems)} problem{'' if len(problems) == 1 else 's'}"
    console.print(Text.assemble(("invalid", "bold red"), f"  {source}: {count}"))


def _print_paragraphs(console: Console, problems: Sequence[Problem]) -> None:
    for problem in problems:
        line = f"  line {problem.line}" if problem.line is not None else ""
        warning = "warning  " if problem.severity is Severity.WARNING else ""
        console.print()
        console.print(Text.assemble((warning, "yellow"), (problem.field or "the file", "bold"), (line, "dim")))
        if problem.shown_value:
            console.print(Padding(Text.assemble(("given  ", "dim"), problem.shown_value), (0, 0, 0, 2), expand=False))
        console.print(Padding(Text(problem.message), (0, 0, 0, 2), expand=False))


def _report(path: Path, documents: Sequence[LoadedJob]) -> dict[str, object]:
    """Return the object of --json, with the problems of all documents and the index of each document."""
    indexed = list(enumerate(documents, 1))
    return {
        "path": str(path),
        "valid": not any(loaded.errors for loaded in documents),
        "documents": [
            {
                "index": index,
                "object": loaded.name,
                "checked": not loaded.of_another_kind,
                "valid": not loaded.errors,
            }
            for index, loaded in indexed
        ],
        "problems": [
            {"document": index} | problem.as_dict() for index, loaded in indexed for problem in loaded.problems
        ],
    }


def _print_json(console: Console, report: dict[str, object]) -> None:
    # console.print would wrap and colour it.
    console.file.write(json.dumps(report, default=str) + "\n")


def _summary(job: RLHFJob) -> str:
    spec = job.spec
    counts = {
        Group.GENERATION: spec.generation.replicas,
        Group.INFERENCE: spec.inference.replicas,
        Group.TRAINING: spec.training.ranks,
    }
    graph = graph_of(spec)
    workers = ", ".join(f"{count} {group}" for group, count in counts.items() if graph.tasks_of(group))
    if spec.rank_group is not Group.TRAINING:
        workers += f" ranks in {spec.rank_group} workers"
    text = f"{job.name}, {spec.algorithm.name}, {spec.iterations} iterations, workers: {workers}"
    if spec.operator_class:
        text += f"; only an operator with --operator-class={spec.operator_class} reconciles it"
    return text
