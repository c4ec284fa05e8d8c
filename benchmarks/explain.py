"""Why is it slow: runs with a cause injected, what `rlhf explain` says of them, and the same with the remedy applied.

`python benchmarks/explain.py [--only NAME ...] [--iterations 4] [--keep DIR] [--json]`. Real workers of a stated speed
(`paced_worker`), one job with the cause and one with what the first finding says changed; both decode the same
responses. Reported by scenario: which cause was named first, how many times as fast an iteration was predicted to
be and was, and the error. Nothing but what `rlhf explain` reads (facts.jsonl) is looked at.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import pinned_job
from benchmarks.explain_scenarios import SCENARIOS, InjectedCause
from benchmarks.long_tail_job import SMALL
from benchmarks.long_tail_policy import write_policy

from rlhf_coordinator.reports.trackers.facts_jsonl import FILE, read_facts
from rlhf_planner.explain.finding import Finding
from rlhf_planner.explain.iteration_profile import IterationProfile
from rlhf_planner.explain.ranking import comparable, explain


def run(folder: Path, scenario: InjectedCause, iterations: int) -> list[IterationProfile]:
    """The facts of a run of it."""
    folder.mkdir()
    write_policy(folder / "policy", layers=2, repeated=scenario.repeated)
    manifest = pinned_job.write_job(
        folder,
        "explained",
        iterations=iterations,
        batch=scenario.batch,
        max_tokens=scenario.max_tokens,
        reference=SMALL,
        **scenario.spec(folder),
    )
    (folder / "reward.py").write_text(scenario.reward)
    groups = ["generation"] * scenario.generation + ["inference"] * scenario.inference
    paces = [scenario.pace.slower(times) for times in scenario.speeds or (1.0,) * scenario.generation]
    paces += [scenario.pace] * scenario.inference
    return comparable(read_facts(pinned_job.run_job(manifest, groups, pace=paces) / FILE))


def measure(name: str, iterations: int, keep: Path | None) -> dict[str, Any]:
    """A row of the table."""
    scenario = SCENARIOS[name]
    with tempfile.TemporaryDirectory(prefix="rlhf-explain-") as folder:
        before = run(Path(folder) / "before", scenario, iterations)
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            (keep / f"{name}.jsonl").write_bytes((Path(folder) / "before/run" / FILE).read_bytes())
        findings = explain(before)
        first = findings[0] if findings else None
        row: dict[str, Any] = {
            "scenario": name,
            "injected": scenario.cause,
            "before": _seconds(before, amortized=scenario.amortized),
        }
        row |= {"named": [finding.cause for finding in findings], "words": first.words if first else ""}
        if first is None or first.cause != scenario.cause or first.gain is None:
            return row
        after = run(Path(folder) / "after", scenario.changed(first), iterations)
        measured = _seconds(before, amortized=scenario.amortized) / _seconds(after, amortized=scenario.amortized)
        row |= {"after": _seconds(after, amortized=scenario.amortized), "predicted": first.gain, "measured": measured}
        return row | {"error": first.gain / measured - 1, "change": _change(first)}


def _change(finding: Finding) -> str:
    return f"{finding.field} = {finding.value}" if finding.field else finding.remedy


def _seconds(facts: Sequence[IterationProfile], *, amortized: bool) -> float:
    """Of the last iteration, which findings are about; of what is not done in each, the mean of those before it."""
    some = facts[:-1] if amortized else facts[-1:]
    return sum(one.total for one in some) / len(some)


def main() -> int:
    """Prints a table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="copy the facts of the runs with a cause there")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.only:
        rows.append(measure(name, arguments.iterations, arguments.keep))
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in rows[-1].items()})
        sys.stdout.flush()
    first = sum(row["named"][:1] == [row["injected"]] for row in rows)
    within = sum(abs(row.get("error", 1.0)) <= 0.15 for row in rows)
    print(f"{first} of {len(rows)} named first, {within} with a gain within 15%")
    if arguments.json:
        print(json.dumps({"rows": rows, "named_first": first, "within": within, "load": os.getloadavg()[2]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
