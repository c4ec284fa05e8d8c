"""`rlhf schedule`: find, compare and check fused pipeline schedules from files, without a job or a cluster.

Rule: a bad instance, schedule or option ends with one message and exit code 2; a schedule that the checker refuses,
with 1.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from rlhf_common.json_document import parse_json
from rlhf_common.names import ExitCode

if TYPE_CHECKING:
    from rlhf_planner.schedule.instance import Instance
    from rlhf_planner.schedule.solve import SearchOptions, Solution

app = typer.Typer(
    name="schedule",
    help="Find, compare and check fused pipeline schedules: several models that train at once on the same devices.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

InstanceFile = Annotated[
    Path,
    typer.Option(
        "--instance",
        metavar="FILE.json",
        help="The models, stages and costs to schedule.",
        show_default=False,
        dir_okay=False,
    ),
]
Seconds = Annotated[
    float, typer.Option("--seconds", metavar="SECONDS", help="Effort of the search, in seconds of an idle core.")
]
Seed = Annotated[
    int, typer.Option("--seed", metavar="N", help="Seed of the search; the same seed gives the same schedule.")
]
Split = Annotated[
    bool,
    typer.Option(
        "--split-backward", help="Let weight-gradient steps run later than their backward step. Default: off."
    ),
]
Cap = Annotated[
    float | None,
    typer.Option("--memory-cap", metavar="X", help="Peak activation allowed per device. Default: the instance's."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object for programs. Default: off.")]


@app.command()
def solve(
    instance: InstanceFile,
    seconds: Seconds = 10.0,
    split_backward: Split = False,
    memory_cap: Cap = None,
    makespan_slack: Annotated[
        float,
        typer.Option(metavar="SHARE", help="Share of the makespan to trade for a lower peak, such as 0.03."),
    ] = 0.0,
    seed: Seed = 0,
    as_json: Json = False,
    picture: Annotated[
        Path | None, typer.Option(metavar="OUT.svg", help="Draw a Gantt chart, as .svg or .png. Default: none.")
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder that caches answers. Default: none.",
            file_okay=False,
        ),
    ] = None,
) -> None:
    """Search for a short schedule, then for one with less activation that is longer by at most --makespan-slack."""
    from rlhf_cli.local.errors import RunError
    from rlhf_cli.output_file import PICTURES, check_output_file
    from rlhf_planner.schedule.instance import InstanceError
    from rlhf_planner.schedule.solve import SearchOptions

    try:
        if picture is not None:
            check_output_file("--picture", picture, PICTURES)
    except RunError as error:
        _fail(str(error), ExitCode.USAGE)
    try:
        problem = _instance(instance, memory_cap)
        options = SearchOptions(seconds, split_backward, seed, makespan_slack)
        answer = _answer(problem, options, cache)
    except InstanceError as error:
        _fail(str(error), ExitCode.USAGE)
    if picture is not None:
        _draw(problem, answer, picture)
    if as_json:
        print(json.dumps(answer))
    else:
        _print_answer(problem, answer)


@app.command()
def compare(instance: InstanceFile, seconds: Seconds = 10.0, seed: Seed = 0, as_json: Json = False) -> None:
    """Compare all baselines with the fused schedule, with and without split backward, and with the bounds."""
    from rlhf_planner.schedule.instance import InstanceError
    from rlhf_planner.schedule.solve import SearchOptions
    from rlhf_planner.schedule.solve import solve as search

    try:
        problem = _instance(instance, None)
        whole = search(problem, SearchOptions(seconds, False, seed), time.monotonic)
        split = search(problem, SearchOptions(seconds, True, seed), time.monotonic)
    except InstanceError as error:
        _fail(str(error), ExitCode.USAGE)
    rows = _comparison(problem, whole, split)
    if as_json:
        print(json.dumps({"schedules": rows, "lowerBound": whole.lower_bound, "splitLowerBound": split.lower_bound}))
        return
    _print_table(rows, whole, split)


@app.command()
def check(
    instance: InstanceFile,
    schedule: Annotated[
        Path, typer.Option("--schedule", metavar="FILE.json", help="Output of `solve --json`.", show_default=False)
    ],
    as_json: Json = False,
) -> None:
    """Check a schedule against an instance, by a checker with its own statement of the rules."""
    from rlhf_planner.schedule.instance import InstanceError
    from rlhf_planner.schedule.report import devices_from_json
    from rlhf_planner.schedule.schedule_check import ScheduleError, check_schedule

    try:
        problem = _instance(instance, None)
        steps = devices_from_json(_read(schedule, "--schedule"))
    except InstanceError as error:
        _fail(f"--schedule {schedule}: {error}", ExitCode.USAGE)
    try:
        checked = check_schedule(problem, steps)
    except ScheduleError as error:
        if as_json:
            print(json.dumps({"valid": False, "problem": str(error)}))
            raise typer.Exit(ExitCode.FAILED) from None
        _fail(f"not valid: {error}", ExitCode.FAILED)
    if as_json:
        print(json.dumps({"valid": True, "makespan": checked.makespan, "peakActivation": max(checked.peaks)}))
    else:
        typer.echo(f"valid: makespan {checked.makespan:g}, peak activation {max(checked.peaks):g}")


def _fail(message: str, code: int) -> NoReturn:
    typer.secho(f"error: {message}", fg="red", err=True)
    raise typer.Exit(int(code))


def _read(path: Path, option: str) -> Any:
    try:
        return parse_json(path.read_text())
    except OSError as error:
        _fail(f"{option} {path}: {error.strerror or error}", ExitCode.USAGE)
    except ValueError as error:
        _fail(f"{option} {path}: not JSON: {error}", ExitCode.USAGE)


def _instance(path: Path, cap: float | None) -> Instance:
    from rlhf_planner.schedule.instance import InstanceError, from_json

    try:
        problem = from_json(_read(path, "--instance"))
    except InstanceError as error:
        _fail(f"--instance {path}: {error}", ExitCode.USAGE)
    return problem if cap is None else problem.with_cap(cap)


def _answer(problem: Instance, options: SearchOptions, cache: Path | None) -> dict[str, Any]:
    from rlhf_planner.schedule.cache_on_disk import solve_cached
    from rlhf_planner.schedule.report import solution_json
    from rlhf_planner.schedule.solve import solve as search

    def run() -> dict[str, Any]:
        return solution_json(search(problem, options, time.monotonic))

    return run() if cache is None else solve_cached(cache, problem, options, run)[0]


def _draw(problem: Instance, answer: dict[str, Any], picture: Path) -> None:
    from rlhf_planner.schedule.report import devices_from_json
    from rlhf_planner.schedule.schedule_figures import draw

    form = picture.suffix.lower().lstrip(".")
    title = f"{answer['method']}: makespan {answer['makespan']:g}, peak activation {answer['peakActivation']:g}"
    try:
        picture.write_bytes(draw(problem, devices_from_json(answer), title, form))
    except OSError as error:
        _fail(f"--picture {picture}: {error.strerror or error}", ExitCode.USAGE)


def _print_answer(problem: Instance, answer: dict[str, Any]) -> None:
    from rlhf_planner.schedule.report import devices_from_json
    from rlhf_planner.schedule.schedule_chart import terminal_chart

    typer.echo(terminal_chart(problem, devices_from_json(answer)))
    proven = "at the lower bound" if answer["atBound"] else f"lower bound {answer['lowerBound']:g}"
    peak = "the least possible" if answer["peakAtBound"] else f"at least {answer['peakLowerBound']:g} is needed"
    typer.echo(f"makespan         {answer['makespan']:g} ({proven})")
    typer.echo(f"peak activation  {answer['peakActivation']:g} ({peak} at this makespan)")
    typer.echo(f"bubble           {answer['bubble']:.1%}")
    clock = ", ended by the clock" if answer["endedByClock"] else ""
    typer.echo(f"found by         {answer['method']} in {answer['seconds']:.1f} s{clock}")
    if answer["cutShort"]:
        typer.echo(f"cut short        the {answer['cutShort']}: --seconds ended before it was proven to be the least")
    for name, base in answer["baselines"].items():
        typer.echo(f"  {name:<26} makespan {base['makespan']:g}, peak activation {base['peakActivation']:g}")


def _comparison(problem: Instance, whole: Solution, split: Solution) -> list[dict[str, Any]]:
    from rlhf_planner.schedule.baselines import chimera, interleaved

    def row(name: str, makespan: float, peak: float) -> dict[str, Any]:
        return {"name": name, "makespan": round(makespan, 9), "peakActivation": round(peak, 9)}

    rows = [row(name, base.makespan, base.peak) for name, base in whole.baselines.items()]
    for chunks in (2, 4):
        other = interleaved(problem, chunks)
        if other is not None:
            rows.append(row(f"interleaved-1f1b-v{chunks}", other.makespan, other.peak))
    both = chimera(problem)
    if both is not None:
        rows.append(row("chimera", both.makespan, both.peak))
    rows.append(row("fused", whole.timeline.makespan, whole.timeline.peak))
    rows.append(row("fused, split backward", split.timeline.makespan, split.timeline.peak))
    return rows


def _print_table(rows: list[dict[str, Any]], whole: Solution, split: Solution) -> None:
    serial = rows[0]["makespan"]
    typer.echo(f"{'schedule':<28}{'makespan':>10}{'speed-up':>10}{'peak activation':>17}")
    for row in rows:
        speedup = f"{serial / row['makespan']:.2f}x"
        typer.echo(f"{row['name']:<28}{row['makespan']:>10g}{speedup:>10}{row['peakActivation']:>17g}")
    typer.echo(f"{'lower bound':<28}{whole.lower_bound:>10g}{'':>10}{whole.peak_bound:>17g}")
    typer.echo(f"{'lower bound, split backward':<28}{split.lower_bound:>10g}{'':>10}{split.peak_bound:>17g}")
    typer.echo("Interleaved 1F1B and Chimera ignore the memory cap; Chimera holds every model's weights twice.")
