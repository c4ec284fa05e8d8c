"""Real jobs whose training rows share prompts: they learn as with whole samples, and a kill changes no weight."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.support.jobs.chaos import Ended, killed_beside_undisturbed, run_job
from tests.support.jobs.local_job import write_job

pytestmark = pytest.mark.timeout(900)

RATIO = "training/train/shared_prompt_ratio"
PADDING = "training/train/padding"
PACKED = ("training.packing=true", "training.microBatchSize=16", "algorithm.grpo.miniBatchSize=16")
TRAINER = "algorithm.grpo.oldLogProbabilities=Trainer"
SHARED = (*PACKED, "training.sharedPrompts=Enabled")
TOLERANCE = 1e-5


def weights_of(run: Ended) -> dict[str, torch.Tensor]:
    newest = max((run.run_dir / "checkpoints").glob("iteration-*"))
    return {name: value for file in (newest / "actor").glob("*.safetensors") for name, value in load_file(file).items()}


def test_weights_are_close_to_those_of_whole_samples(tmp_path: Path) -> None:
    """Tolerance: AdamW divides by the gradient's size, so rounding moves a weight by a share of the learning rate."""
    manifest = write_job(tmp_path, algorithm="grpo", iterations=2, every=2)
    whole = run_job(manifest, tmp_path / "whole", settings=(*PACKED, TRAINER))
    for mode in ("Enabled", "Auto"):
        settings = (*PACKED, TRAINER, f"training.sharedPrompts={mode}")
        shared = run_job(manifest, tmp_path / mode, settings=settings)
        assert [line["reward"] for line in shared.lines] == [line["reward"] for line in whole.lines]
        ours, theirs = weights_of(shared), weights_of(whole)
        assert ours.keys() == theirs.keys()
        worst = max(float((ours[name] - value).abs().max()) for name, value in theirs.items())
        assert 0 < worst < TOLERANCE
        assert all(line[RATIO] < 0.95 and line[PADDING] == 0.0 for line in shared.lines)
    assert not any(RATIO in line for line in whole.lines)


@pytest.mark.full
def test_killed_ranks_go_on_to_the_same_weights(tmp_path: Path) -> None:
    """Rows of unequal shapes pass between two stages; groups are parted by tokens and over mini-batches."""
    manifest = write_job(tmp_path, algorithm="grpo", iterations=4, every=2)
    settings = (*SHARED, "training.microBatchTokens=90", "algorithm.grpo.miniBatchSize=8", "training.microBatchSize=8")
    _, undisturbed = killed_beside_undisturbed(manifest, tmp_path, settings, 27)
    assert all(line[RATIO] < 1 for line in undisturbed.lines)
    assert all(line["training/train/largest_micro_batch_tokens"] <= 90 for line in undisturbed.lines)
