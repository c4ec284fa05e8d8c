"""The command lines of the verbs against a cluster. Declarations only; nothing heavy is imported before a verb runs.

Rule: flags are kubectl's where kubectl has them, so that hands which know one know the other.
"""

from collections.abc import Awaitable, Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from rlhf_api.names import Group

if TYPE_CHECKING:
    from rlhf_cli.cluster.session import Session

PANEL = "On a cluster"

Name = Annotated[str, typer.Argument(metavar="JOB", help="Name of the RLHFJob.", show_default=False)]
Kubeconfig = Annotated[
    Path | None, typer.Option("--kubeconfig", metavar="FILE", help="Instead of KUBECONFIG or ~/.kube/config.")
]
Context = Annotated[str | None, typer.Option("--context", metavar="NAME", help="Another context of the kubeconfig.")]
Namespace = Annotated[
    str | None, typer.Option("-n", "--namespace", metavar="NAME", help="Another namespace than the context's.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Let the API server check the change, and change nothing.")]


class Form(StrEnum):
    """Of the output of get."""

    WIDE = "wide"
    NAME = "name"
    JSON = "json"
    YAML = "yaml"


def register(app: typer.Typer) -> None:
    """Adds the verbs."""
    for verb in (get, describe, logs, top, suspend, resume, scale, wait):
        app.command(rich_help_panel=PANEL)(verb)


def _end(
    kubeconfig: Path | None,
    context: str | None,
    namespace: str | None,
    verb: "Callable[[Session], Awaitable[int]]",
) -> NoReturn:
    """Ends the command with the exit code of `verb`, run with the user's own rights."""
    from rlhf_cli.cluster.session import Target, run

    raise typer.Exit(run(Target(kubeconfig, context, namespace), verb))


def get(
    jobs: Annotated[list[str] | None, typer.Argument(metavar="JOB...", show_default=False)] = None,
    every: Annotated[bool, typer.Option("-A", "--all-namespaces", help="Jobs of all namespaces.")] = False,
    selector: Annotated[str, typer.Option("-l", "--selector", metavar="LABELS", help="Only jobs with these.")] = "",
    form: Annotated[Form | None, typer.Option("-o", "--output", help="Another form of output.")] = None,
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Stay, and show changes as they come.")] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """List jobs: phase, progress, reward, speed."""
    if jobs and (every or selector):
        raise typer.BadParameter("names mean jobs of one namespace: leave out -A and -l, or the names")
    from rlhf_cli.cluster import show

    asked = show.Shown(tuple(jobs or ()), every, selector, form.value if form else "", watch)
    _end(kubeconfig, context, namespace, lambda session: show.get(session, asked))


def describe(job: Name, namespace: Namespace = None, context: Context = None, kubeconfig: Kubeconfig = None) -> None:
    """Say what a job does or waits for, and all that is known of it."""
    from rlhf_cli.cluster import watching

    _end(kubeconfig, context, namespace, lambda session: watching.describe(session, job))


def logs(
    job: Name,
    group: Annotated[Group | None, typer.Option(help="Only this group.", show_default=False)] = None,
    index: Annotated[int | None, typer.Option(min=0, metavar="N", help="Only workers of this index.")] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Stay, also over restarts of pods.")] = False,
    previous: Annotated[
        bool, typer.Option("-p", "--previous", help="Of the container before the last restart.")
    ] = False,
    tail: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Last lines of each pod; of several pods, 20.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Lines as they were written.")] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Print the logs of a job's pods, in order of time."""
    if follow and previous:
        raise typer.BadParameter("a container that has ended is not followed: leave out --follow or --previous")
    from rlhf_cli.cluster import logs as reading

    asked = reading.Asked(group, index, follow, previous, tail, raw)
    _end(kubeconfig, context, namespace, lambda session: reading.logs(session, job, asked))


def top(
    job: Name,
    once: Annotated[bool, typer.Option("--once", help="Print once; so is done in a pipe.")] = False,
    every: Annotated[float, typer.Option("--every", min=1.0, metavar="S", help="Seconds between two looks.")] = 2.0,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show what the workers of a job do, as `rlhf run` does."""
    from rlhf_cli.cluster import watching

    _end(kubeconfig, context, namespace, lambda session: watching.top(session, job, every, once=once))


def suspend(
    job: Name,
    dry_run: DryRun = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Checkpoint a job and stop its workers until it is resumed."""
    from rlhf_cli.cluster import change, changes

    _end(kubeconfig, context, namespace, lambda session: change.send(session, job, changes.suspend, dry_run=dry_run))


def resume(
    job: Name,
    dry_run: DryRun = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Let a suspended job go on from its last checkpoint."""
    from rlhf_cli.cluster import change, changes

    _end(kubeconfig, context, namespace, lambda session: change.send(session, job, changes.resume, dry_run=dry_run))


def scale(
    job: Name,
    sizes: Annotated[list[str], typer.Argument(metavar="GROUP=N...", help="E.g. generation=4 inference=2.")],
    dry_run: DryRun = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Change the number of generation and inference workers of a job, running or not."""
    from rlhf_cli.cluster import change, changes

    wanted = changes.parse_sizes(sizes)
    made = lambda stored: changes.scale(stored, wanted)  # noqa: E731 said once, used once
    _end(kubeconfig, context, namespace, lambda session: change.send(session, job, made, dry_run=dry_run))


def wait(
    job: Name,
    goal: Annotated[
        str, typer.Option("--for", metavar="WHAT", help="condition=NAME[=STATUS], phase=NAME, iteration=N or delete.")
    ] = "condition=Complete",
    timeout: Annotated[str, typer.Option(metavar="TIME", help="90s, 5m, 1h30m.")] = "24h",
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Wait for a condition, a phase or an iteration; a failure of the job ends the wait with its exit code."""
    from rlhf_cli.cluster import waiting

    wanted, seconds = waiting.parse_goal(goal), waiting.parse_duration(timeout)
    _end(kubeconfig, context, namespace, lambda session: waiting.wait(session, job, wanted, seconds))
