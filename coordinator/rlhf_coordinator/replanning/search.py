"""`python -m rlhf_coordinator.replanning.search`: predict a job's plan and the fastest one with the run's own figures.

It reads one JSON question from standard input and writes one JSON answer to standard output.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, Final

from rlhf_api.device_sizes import asking_job
from rlhf_api.protocol import read_job
from rlhf_coordinator.device_plan import recorded_plan, written_plan
from rlhf_coordinator.learned_figures import read_workload, run_costs
from rlhf_coordinator.storage.journal import Journal
from rlhf_planner.plan_search.size_choice import choose_again

NICENESS: Final = 10
"""Increment of the process's niceness: training goes on meanwhile."""


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Return the plan in force and the fastest one, as records. Raises UnplannableError if no plan fits."""
    run = Path(question["run"])
    plan = recorded_plan(Journal(run / "journal"))
    assert plan is not None, "the run has a plan"
    job = asking_job(read_job(question["job"]), plan)
    own, best = choose_again(job, read_workload(job, run)[0], run_costs(job, run)[0])
    same = {"request": plan.request}
    return {name: written_plan(each.model_copy(update=same)) for name, each in (("own", own), ("best", best))}


if __name__ == "__main__":
    os.nice(NICENESS)
    print(json.dumps(answer(json.load(sys.stdin))))
