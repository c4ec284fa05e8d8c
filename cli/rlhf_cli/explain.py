"""`rlhf explain`: why a job takes as long as it does, and which change would help.

For a run folder, finished or live, it reads the recorded iteration profiles, and compares the run's plan with the best
one for as many devices.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.text import Text

from rlhf_cli.console import output, paragraph
from rlhf_cli.local.errors import RunError
from rlhf_cli.local.run_folder import holds_run, why_no_run
from rlhf_cli.plan_comparison import compare_plan
from rlhf_common.json_document import parse_json
from rlhf_common.names import ExitCode
from rlhf_coordinator.replanning.drift import last_decision
from rlhf_coordinator.reports.trackers.facts_jsonl import FILE, read_facts
from rlhf_planner.explain.finding import Finding
from rlhf_planner.explain.iteration_profile import IterationProfile
from rlhf_planner.explain.ranking import SHOWN, comparable, explain, headline
from rlhf_planner.inter_stage.long_rounds import JOB_KEY


def explain_run(run_dir: Path, *, everything: bool, as_json: bool) -> int:
    """Print where the time of a run went; return the exit code. Raises RunError, such as for a run without profiles."""
    facts = _facts(run_dir)
    findings = explain(facts)
    shown = findings if everything else findings[:SHOWN]
    if as_json:
        plan = compare_plan(run_dir)
        compared = {"missing": plan} if isinstance(plan, str) else {**asdict(plan), "words": plan.words}
        more = {"plan": compared, "longRounds": _long_rounds(run_dir), "planDrift": last_decision(run_dir)}
        print(json.dumps({**document(facts, shown), **more}))
        return int(ExitCode.OK)
    console = output()
    width = console.width if console.is_terminal else None
    for line in lines_of(facts, shown, width):
        console.print(line, soft_wrap=True)
    if reason := _long_rounds(run_dir):
        for line in paragraph(Text(f"rounds: {reason}"), width):
            console.print(line, soft_wrap=True)
    plan = compare_plan(run_dir)  # after the findings, because it may search for seconds
    words = f"not compared: {plan}" if isinstance(plan, str) else plan.words
    for line in paragraph(Text(f"plan: {words}"), width):
        console.print(line, soft_wrap=True)
    if drift := last_decision(run_dir):
        for line in paragraph(Text(f"plan for spec.devices: {drift}"), width):
            console.print(line, soft_wrap=True)
    return int(ExitCode.OK)


def document(facts: Sequence[IterationProfile], findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the findings for --json."""
    seen = comparable(facts)
    return {
        "iterations": [profile.iteration for profile in seen],
        "seconds": sum(profile.total for profile in seen) / len(seen),
        "findings": [{**asdict(finding), "words": finding.words} for finding in findings],
    }


def lines_of(facts: Sequence[IterationProfile], findings: Sequence[Finding], width: int | None) -> list[Text]:
    """Return the findings as lines for people."""
    lines = paragraph(Text(headline(facts), style="bold"), width)
    if not findings:
        return [*lines, Text("no loss reaches 3% of an iteration")]
    for number, finding in enumerate(findings, 1):
        lines += paragraph(Text(f"{number}. {finding.cause}: {finding.words}"), width)
    return lines


def _long_rounds(run_dir: Path) -> str | None:
    """Return why a run with longRounds Auto has long rounds or none; None if its journal does not say it."""
    try:
        return str(parse_json((run_dir / "journal" / "job.json").read_bytes())[JOB_KEY]["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _facts(run_dir: Path) -> list[IterationProfile]:
    """Return the iteration profiles of a run folder. Raises RunError where there are none."""
    if not holds_run(run_dir):
        raise RunError(f"RUN {run_dir}: {why_no_run(run_dir)}")
    try:
        facts = read_facts(run_dir / FILE)
    except OSError as error:
        raise RunError(f"RUN {run_dir}: {FILE} cannot be read ({error})", ExitCode.STORAGE) from error
    if not comparable(facts):
        raise RunError(
            f"RUN {run_dir}: {FILE} has no iteration: none is finished, spec.metrics is Disabled, or an earlier "
            "version ran it"
        )
    return facts
