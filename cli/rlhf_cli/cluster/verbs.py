"""The command lines of the verbs against a cluster; heavy imports wait until a verb runs.

Rule: flags are kubectl's where kubectl has them.
"""

from collections.abc import Awaitable, Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from rlhf_common.names import Group

if TYPE_CHECKING:
    from rlhf_cli.cluster.cluster_session import ClusterSession

PANEL = "On a cluster"

Name = Annotated[str, typer.Argument(metavar="JOB", help="Name of the RLHFJob.", show_default=False)]
Kubeconfig = Annotated[
    Path | None,
    typer.Option("--kubeconfig", metavar="FILE", help="Kubeconfig file. Default: $KUBECONFIG, or else ~/.kube/config."),
]
Context = Annotated[
    str | None,
    typer.Option("--context", metavar="NAME", help="Context of the kubeconfig. Default: its current context."),
]
Namespace = Annotated[
    str | None, typer.Option("-n", "--namespace", metavar="NAME", help="Namespace. Default: that of the context.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Let the API server check the change, and change nothing. Default: off.")
]


class OutputFormat(StrEnum):
    """Values of --output of `rlhf get`."""

    WIDE = "wide"
    NAME = "name"
    JSON = "json"
    YAML = "yaml"


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    for verb in (get, describe, logs, top, suspend, resume, scale, wait):
        app.command(rich_help_panel=PANEL)(verb)


def run_verb(
    kubeconfig: Path | None,
    context: str | None,
    namespace: str | None,
    verb: "Callable[[ClusterSession], Awaitable[int]]",
) -> NoReturn:
    """Run `verb` with the user's own rights and end the command with its exit code."""
    from rlhf_cli.cluster.cluster_session import ConnectionFlags, run

    raise typer.Exit(run(ConnectionFlags(kubeconfig, context, namespace), verb))


def get(
    jobs: Annotated[
        list[str] | None,
        typer.Argument(metavar="JOB...", help="Names of RLHFJobs. Default: all of the namespace.", show_default=False),
    ] = None,
    all_namespaces: Annotated[
        bool, typer.Option("-A", "--all-namespaces", help="List the jobs of all namespaces. Default: off.")
    ] = False,
    selector: Annotated[
        str,
        typer.Option(
            "-l", "--selector", metavar="LABELS", help="List only jobs with these labels, such as team=a. Default: all."
        ),
    ] = "",
    output_format: Annotated[
        OutputFormat | None, typer.Option("-o", "--output", help="Format of the output. Default: a table.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("-w", "--watch", help="Stay, and show every change until Ctrl-C. Default: off.")
    ] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """List jobs: phase, progress, reward, speed."""
    if jobs and (all_namespaces or selector):
        raise typer.BadParameter("names mean jobs of one namespace: leave out -A and -l, or the names")
    from rlhf_cli.cluster import get as getting

    chosen = output_format.value if output_format else ""
    options = getting.GetOptions(tuple(jobs or ()), all_namespaces, selector, chosen, watch)
    run_verb(kubeconfig, context, namespace, lambda session: getting.get(session, options))


def describe(job: Name, namespace: Namespace = None, context: Context = None, kubeconfig: Kubeconfig = None) -> None:
    """Say what a job does or waits for, and what is known of it."""
    from rlhf_cli.cluster import describe as describing

    run_verb(kubeconfig, context, namespace, lambda session: describing.describe(session, job))


def logs(
    job: Name,
    group: Annotated[
        Group | None, typer.Option(help="Only pods of this group. Default: all groups.", show_default=False)
    ] = None,
    index: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Only workers of this index, from 0. Default: all indices."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Stay, also over restarts of pods, until the job ends. Default: off.")
    ] = False,
    previous: Annotated[
        bool, typer.Option("-p", "--previous", help="Show the container before the last restart. Default: off.")
    ] = False,
    tail: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="N", help="Last lines of each pod. Default: 20 of several pods, all of a single one."
        ),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Print the lines as they were written. Default: off.")] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Print the logs of a job's pods: in order of time, or with --follow as lines arrive."""
    if follow and previous:
        raise typer.BadParameter("a container that has ended is not followed: leave out --follow or --previous")
    from rlhf_cli.cluster import logs as reading

    options = reading.LogOptions(group, index, follow, previous, tail, raw)
    run_verb(kubeconfig, context, namespace, lambda session: reading.logs(session, job, options))


def top(
    job: Name,
    once: Annotated[bool, typer.Option("--once", help="Print once and end, as in a pipe. Default: off.")] = False,
    every: Annotated[
        float, typer.Option("--every", min=1.0, metavar="SECONDS", help="Seconds between two refreshes, at least.")
    ] = 2.0,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show what the workers of a job do, as `rlhf run` does."""
    from rlhf_cli.cluster import top as viewing

    run_verb(kubeconfig, context, namespace, lambda session: viewing.top(session, job, every, once=once))


def suspend(
    job: Name,
    dry_run: DryRun = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Stop a job's workers until it is resumed; with spec.checkpoints, save a checkpoint first."""
    from rlhf_cli.cluster import spec_change

    run_verb(
        kubeconfig,
        context,
        namespace,
        lambda session: spec_change.send(session, job, spec_change.suspend, dry_run=dry_run),
    )


def resume(
    job: Name,
    dry_run: DryRun = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Let a suspended job go on from its last checkpoint, or from the beginning without one."""
    from rlhf_cli.cluster import spec_change

    run_verb(
        kubeconfig,
        context,
        namespace,
        lambda session: spec_change.send(session, job, spec_change.resume, dry_run=dry_run),
    )


def scale(
    job: Name,
    sizes: Annotated[
        list[str], typer.Argument(metavar="GROUP=N...", help="Workers per group, such as generation=4 inference=2.")
    ],
    dry_run: DryRun = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Set the number of generation and inference workers.

    The job may run or be suspended.
    """
    from functools import partial

    from rlhf_cli.cluster import spec_change

    change_of = partial(spec_change.scale, sizes=spec_change.parse_sizes(sizes))
    run_verb(kubeconfig, context, namespace, lambda session: spec_change.send(session, job, change_of, dry_run=dry_run))


def wait(
    job: Name,
    goal: Annotated[
        str, typer.Option("--for", metavar="WHAT", help="condition=NAME[=STATUS], phase=NAME, iteration=N or delete.")
    ] = "condition=Complete",
    timeout: Annotated[
        str, typer.Option(metavar="TIME", help="Longest wait, such as 90s, 5m or 1h30m; a bare number is seconds.")
    ] = "24h",
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Wait for a condition, phase, iteration or deletion of a job.

    If the job fails first, the wait ends with the exit code of the failure, except a wait for the deletion. A time-out
    ends it with exit code 124.
    """
    from rlhf_cli.cluster import wait as waiting

    wanted, seconds = waiting.parse_goal(goal), waiting.parse_duration(timeout)
    run_verb(kubeconfig, context, namespace, lambda session: waiting.wait(session, job, wanted, seconds))
