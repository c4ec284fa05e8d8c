"""A real job whose training ranks are in its generation workers ends with the bits of one with separate ranks.

One lends new weights in memory, the other streams them.
"""

from pathlib import Path

import pytest
from tests.support.jobs.chaos import Kills, assert_same_weights, run_job
from tests.support.jobs.local_job import write_job

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

ITERATIONS = 4
VICTIMS = ("generation-0", "generation-1")
PHASES = ("Generating", "Training")
SEED = 9
APART = ("fusion.interStage.mode=Disabled", "fusion.intraStage.mode=Disabled", "training.weightSharing=Disabled")
TOGETHER = ("placement=Colocated", "inference.replicas=0", "fusion.intraStage.mode=Disabled")
OUTCOME = ("iteration", "reward", "tokens", "kl", "kl_per_token")


def test_ranks_in_generation_workers_change_no_bit_though_one_is_killed_decoding_and_one_training(
    tmp_path: Path,
) -> None:
    manifest = write_job(tmp_path, iterations=ITERATIONS, responses=60)
    dedicated = run_job(manifest, tmp_path / "dedicated", settings=APART)
    kills = Kills(SEED, len(VICTIMS), VICTIMS, first=VICTIMS, iterations_between=1, in_phases=PHASES)
    colocated = run_job(manifest, tmp_path / "colocated", settings=TOGETHER, kills=kills)
    assert_same_weights(colocated, dedicated)
    assert colocated.reported(*OUTCOME) == dedicated.reported(*OUTCOME)
    logs = {path.stem for path in (tmp_path / "colocated" / "logs").glob("*.log")}
    assert logs - {"fork-server"} == {"coordinator", "generation-0", "generation-1"}
    timeline = colocated.read("timeline.json")
    for span in ("offload/generation", "offload/inference", "offload/training", "onload/training", "onload/generation"):
        assert f'"name":"{span}"' in timeline
    assert '"way":"host_memory"' in timeline, "weights are lent, and those that were streamed are the same"
    assert '"way":"stream"' in dedicated.read("timeline.json")
    assert all(line["seconds/turns"] > 0 for line in colocated.lines)
