"""A whole PPO job of the quickstart's size: coordinator, generation, inference, training, checkpoints.

The full form has the quickstart's warmed-up policy and its reward, which must rise; the small form has three iterations
of an untrained model.
"""

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import torch
from tests.gpu.local_jobs import MISMATCH, REWARD, judge, run_job, spec_of
from tests.gpu.models import TINY, write_model, write_prompts

from gpu_check.plugin import CheckedMachine, Figures

QUICKSTART: Final = Path(__file__).resolve().parents[2] / "examples" / "quickstart"
GAIN: Final = 0.1
"""Required increase of the reward from the first to the last tenth of the iterations."""


@pytest.mark.gpu(seconds=120)
def test_quickstart_ppo(machine: CheckedMachine, figures: Figures) -> None:
    """A whole PPO job of the quickstart's size runs, loses nothing, and learns."""
    folder, (iterations, batch) = machine.scratch, machine.sized((3, 32), (60, 128))
    if machine.small:
        for name in ("policy", "critic"):
            write_model(folder / "assets" / name, TINY, torch.float32, "cpu")
        write_prompts(folder / "assets" / "prompts.jsonl", 4 * batch)
        (folder / "reward.py").write_text(REWARD)
    else:
        figures.say("warming the quickstart's policy up")
        prepare = [sys.executable, str(QUICKSTART / "prepare.py"), "--folder", str(folder / "assets")]
        subprocess.run(prepare, check=True)
        (folder / "reward.py").write_text((QUICKSTART / "reward.py").read_text())
    spec = spec_of(machine, iterations, batch, response=12, micro_batch=batch // 4)
    spec["algorithm"]["ppo"] |= {"klCoefficient": 0.01, "clipRange": 0.2}
    spec["models"] |= {"actor": {"path": "assets/policy"}, "critic": {"path": "assets/critic"}}
    spec["prompts"] = {"path": "assets/prompts.jsonl"}
    optimizer = {"schedule": "Linear", "learningRate": 3.0e-4, "criticLearningRate": 1.0e-3}
    spec["training"] |= {"precision": "Float32", "optimizer": optimizer}
    outcome = run_job(machine, figures, "quickstart-ppo", spec)
    judge(figures, outcome, spec, MISMATCH["Float32"], "quickstart")
    if outcome.summary and not machine.small:
        first, last = outcome.summary["reward_first"], outcome.summary["reward_last"]
        figures.check("the reward rises", last >= first + GAIN, f"from {first:.3f} to {last:.3f}")
