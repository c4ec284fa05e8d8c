"""`rlhf`: the command line. Declares the commands and turns every foreseen error into one message and an exit code.

Rule: nothing heavy is imported before a command needs it, so that `rlhf --help` answers at once. A mistake of the user
never shows a traceback; a defect of this program always does.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from rlhf_api.names import ExitCode
from rlhf_cli import schedule
from rlhf_cli.cluster import verbs

app = typer.Typer(
    name="rlhf",
    help="Train a policy by reinforcement learning from feedback: on this machine, or on a Kubernetes cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Boxes are for people; a log gets plain lines.
    rich_markup_mode="rich" if sys.stderr.isatty() else None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(schedule.app, name="schedule")

Manifest = Annotated[Path, typer.Argument(help="RLHFJob manifest (YAML).", metavar="JOB.YAML", show_default=False)]
Overrides = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Set a field, such as --set spec.iterations=5; null removes it. May be repeated. Default: none.",
        show_default=False,
        default_factory=list,
    ),
]


@app.command()
def run(
    manifest: Manifest,
    overrides: Overrides,
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Run folder. Default: runs/<job>-<time>, or to resume the job's latest run."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the run folder. Default: off.")] = False,
    port: Annotated[
        int | None, typer.Option(metavar="PORT", help="Port of the coordinator, 1 to 65535. Default: a free one.")
    ] = None,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain", help="Print one line per iteration instead of the live view. Default: off, and on in a pipe."
        ),
    ] = False,
) -> None:
    """Run a job on this machine: coordinator and workers as processes.

    Ctrl-C saves a checkpoint and stops the job; a second Ctrl-C stops it at once. `--resume` continues it.
    """
    from rlhf_cli.run import RunOptions, run_job

    raise typer.Exit(run_job(RunOptions(manifest, run_dir, resume, port, plain, tuple(overrides))))


@app.command()
def validate(
    manifest: Manifest,
    target: Annotated[
        str,
        typer.Option(
            "--for",
            metavar="cluster|local",
            help="Where the jobs are to run. With local, as for `rlhf run`, pod templates are not checked.",
        ),
    ] = "cluster",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for programs. Default: off.")] = False,
) -> None:
    """Check every job of a manifest file and print all problems.

    The checks are those of the API server and the operator. Nothing is started.
    """
    from rlhf_cli.load_job import Target
    from rlhf_cli.validate import validate as validate_manifest

    if target not in list(Target):
        raise typer.BadParameter("use cluster or local", param_hint="--for")
    raise typer.Exit(validate_manifest(manifest, target=Target(target), as_json=as_json))


@app.command()
def plan(
    manifest: Manifest,
    overrides: Overrides,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables. Default: off.")
    ] = False,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg", help="Draw generation and inference without and with fusion. Default: none."),
    ] = None,
) -> None:
    """Show a job's processes, devices, memory and gain by fusion.

    Prints the resolved job too. Nothing is started.
    """
    from rlhf_cli.plan import show_plan

    raise typer.Exit(show_plan(manifest, tuple(overrides), as_json=as_json, picture=picture))


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as version_of

    typer.echo(version_of("rlhf-operator"))


verbs.register(app)


def main() -> None:
    """Entry point of `rlhf` and `kubectl rlhf`."""
    try:
        # kubectl finds its plugins by this name; a user types the command with a blank.
        app(prog_name="kubectl rlhf" if Path(sys.argv[0]).name == "kubectl-rlhf" else "rlhf")
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except Exception as error:
        code = _explain(error)
        if code is None:
            raise
        sys.exit(code)


def _explain(error: Exception) -> int | None:
    """Print a foreseen error and return its exit code; None for an unforeseen one."""
    from rlhf_api.problems import ManifestError
    from rlhf_cli.cluster.errors import VerbError
    from rlhf_cli.local.errors import RunError
    from rlhf_operator.api_client.errors import ApiError

    if isinstance(error, BrokenPipeError):  # `rlhf plan | head`
        sys.stderr.close()
        return ExitCode.FAILED
    if not isinstance(error, ManifestError | RunError | VerbError | ApiError):
        return None
    from rlhf_cli.console import errors

    if isinstance(error, ManifestError):
        from rlhf_cli.validate import print_problems

        print_problems(error, errors())
        return int(ExitCode.USAGE)
    errors().print(f"error: {error}", style="red", markup=False, soft_wrap=True)
    return int(ExitCode.FAILED if isinstance(error, ApiError) else error.exit_code)


if __name__ == "__main__":
    main()
