"""`rlhf`: the command line. Declares the commands and turns foreseen errors into one message and an exit code.

Rule: heavy imports wait until a command needs them.
"""

import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from rlhf_cli import schedule
from rlhf_cli.cluster import verbs
from rlhf_common.names import ExitCode

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

MAX_DEVICES: Final = 4096
"""Largest number of devices that `rlhf plan --devices` searches."""
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

Devices = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        max=MAX_DEVICES,
        help="Search the groups, placement and layouts of up to N devices instead. Default: no search.",
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
            help="Where the jobs are to run. With local, as for `rlhf run`, prompts are read by the actor's tokenizer, "
            "and pod templates are not checked.",
        ),
    ] = "cluster",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for programs. Default: off.")] = False,
) -> None:
    """Check every job of a manifest file and print all problems.

    Nothing is started.
    """
    from rlhf_cli.load_job import Target
    from rlhf_cli.validate import validate as validate_manifest

    if target not in list(Target):
        raise typer.BadParameter(f"{target!r} is no place to run: use cluster or local", param_hint="--for")
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
    device_memory: Annotated[
        float | None,
        typer.Option(
            metavar="GIB",
            min=0.001,
            help="Say which training layouts fit devices of so many GiB. Default: none is asked.",
        ),
    ] = None,
    devices: Devices = None,
    costs: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Measured costs for the search. Default: a run's, or assumed ones."),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(metavar="PLAN.yaml", help="Write the manifest with the best plan. Default: none is written."),
    ] = None,
) -> None:
    """Show a job's processes, devices, memory, training layouts and gain by fusion.

    Prints the resolved job too. Nothing is started. With --device-memory the exit code is 2 when the job's layout does
    not fit. With --devices it searches the best plans instead.
    """
    from rlhf_cli.plan import show_plan
    from rlhf_cli.plan_search import SearchRequest, show_search

    if devices is not None:
        if picture is not None:
            raise typer.BadParameter("draws one plan: leave out --devices", param_hint="--picture")
        request = SearchRequest(manifest, tuple(overrides), devices, device_memory, costs, write)
        raise typer.Exit(show_search(request, as_json=as_json))
    for option, path in (("--costs", costs), ("--write", write)):
        if path is not None:
            raise typer.BadParameter("needs --devices N, the number of devices to plan for", param_hint=option)
    code = show_plan(manifest, tuple(overrides), as_json=as_json, picture=picture, device_gib=device_memory)
    raise typer.Exit(code)


@app.command()
def samples(
    run_dir: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="Run folder. Default: the newest in runs/.", show_default=False),
    ] = None,
    iteration: Annotated[
        int | None,
        typer.Option("--iteration", "-i", metavar="N", help="Iteration, from 0. Default: the last with a table."),
    ] = None,
    best: Annotated[int | None, typer.Option(metavar="N", help="Only the N of the highest reward, best first.")] = None,
    worst: Annotated[
        int | None, typer.Option(metavar="N", help="Only the N of the lowest reward, worst first.")
    ] = None,
    sample: Annotated[
        int | None, typer.Option("--sample", "-s", metavar="N", help="Show this one whole. Default: a table of all.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line. Default: off.")] = False,
    parquet: Annotated[
        Path | None,
        typer.Option(metavar="FILE.parquet", help="Write all tables of the run to a file, by pyarrow. Default: none."),
    ] = None,
) -> None:
    """Look at samples of a run: prompts, responses, rewards, advantages.

    Reads the tables that spec.samples asks for. Nothing in a text reaches the terminal as a command to it.
    """
    from rlhf_cli.samples import SampleChoice, show_samples

    choice = SampleChoice(iteration, best, worst, sample)
    raise typer.Exit(show_samples(run_dir, choice, as_json=as_json, parquet=parquet))


@app.command()
def explain(
    job: Annotated[
        str,
        typer.Argument(
            metavar="RUN|JOB", help="Run folder, live or over; else the name of an RLHFJob.", show_default=False
        ),
    ],
    everything: Annotated[
        bool, typer.Option("--all", help="Show all known losses of a run folder. Default: the three largest.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for a run folder. Default: off.")
    ] = False,
    namespace: verbs.Namespace = None,
    context: verbs.Context = None,
    kubeconfig: verbs.Kubeconfig = None,
) -> None:
    """Say why a job takes as long as it does, and what would change it.

    The largest losses in words, with the field to set and the predicted gain where they are known.
    """
    if Path(job).is_dir() or "/" in job:
        from rlhf_cli.explain import explain_run

        raise typer.Exit(explain_run(Path(job), everything=everything, as_json=as_json))
    if everything or as_json:
        raise typer.BadParameter(f"{job!r} is no folder, and --all and --json read the files of one: leave them out")
    from rlhf_cli.cluster import explain as explaining

    verbs.run_verb(kubeconfig, context, namespace, lambda session: explaining.explain(session, job))


@app.command()
def view(
    run_dir: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN", help="Run folder, live or over. Default: the newest in runs/.", show_default=False
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(metavar="PORT", help="Port on 127.0.0.1, 1 to 65535. Default: a free one.")
    ] = None,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in this machine's browser.")
    ] = True,
    target: Annotated[
        Path | None,
        typer.Option("--output", metavar="FOLDER", help="Write the page as a file there. Default: serve it."),
    ] = None,
) -> None:
    """Look at a run in the browser: workers, samples, schedule, iterations.

    Served on this machine alone until Ctrl-C, and kept up to date while the run goes on.
    """
    from rlhf_cli.view import view_run

    raise typer.Exit(view_run(run_dir, port=port, browser=browser, target=target))


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.", show_default=False)],
    target: Annotated[
        Path, typer.Option("--to", metavar="DIR", help="Folder to write, new or empty.", show_default=False)
    ],
    best: Annotated[
        bool, typer.Option("--best", help="The checkpoint of the best evaluation. Default: the newest.")
    ] = False,
    iteration: Annotated[
        int | None, typer.Option("--iteration", "-i", metavar="N", help="The checkpoint of N iterations.")
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(metavar="OWNER/NAME", help="Upload the folder, with the token of HF_TOKEN. Default: do not."),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="A repository that --push makes is public. Default: private.")
    ] = False,
) -> None:
    """Write a trained model as a folder for a model hub, with a model card.

    The checkpoint is checked first. HF_ENDPOINT names another hub than huggingface.co.
    """
    from rlhf_cli.hub.export import ExportOptions
    from rlhf_cli.hub.export import export as export_model

    raise typer.Exit(export_model(ExportOptions(run_dir, target, best, iteration, push, not public)))


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    try:
        typer.echo(version_of("rlhf-operator"))
    except PackageNotFoundError:
        typer.echo("a source tree that is not installed: it has no version")


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
    """Print a foreseen error, apart from a broken pipe, and return its exit code; None for an unforeseen one."""
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
