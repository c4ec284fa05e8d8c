"""Iterations that train only the critic: which weights change, and that a restart continues them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.training.fused_ranks import assert_fused_and_split_train_the_bits_of_serial, fused_job
from tests.support.training.training_ranks import (
    Alone,
    assert_bitwise,
    exhaust,
    finish_folder,
    make_batch,
    make_job,
    run,
    serial,
    trainer_of,
    weights_of,
)

from rlhf_api.job import RLHFJob
from rlhf_api.job.groups import Optimizer
from rlhf_workers.training.checkpoints import checkpoint
from rlhf_workers.training.optimizers.optimizer import Horizon, learning_rate
from rlhf_workers.training.trainer import Trainer

PPO = {"miniBatchSize": 4, "epochs": 2, "klTarget": 2.0, "klHorizon": 50}
WARMED = {"ppo": {**PPO, "criticWarmupIterations": 2}}


def of_model(trainers: list[Trainer], model: str) -> dict[str, torch.Tensor]:
    return {name: value for name, value in weights_of(trainers).items() if name.startswith(model)}


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def test_the_critic_trains_as_without_a_warm_up_and_the_actor_as_if_the_job_began_after_it(folder: Path) -> None:
    job, plain = (make_job(folder, folder, algorithm=algorithm) for algorithm in (WARMED, {"ppo": PPO}))
    start = trainer_of(job, serial(job, 1, 1), 0, 1, Alone())
    warm, first, _ = run(job, range(2))
    assert_equal(of_model(warm, "actor"), of_model([start], "actor"))
    steady = make_job(folder, folder, algorithm={"ppo": {"miniBatchSize": 4, "epochs": 2}})
    assert_equal(of_model(warm, "critic"), of_model(run(steady, range(2))[0], "critic"))
    for line in first:
        assert line["train/critic_only"] == 1.0
        assert line["gradient_norm/critic"] > 0
        assert line["actor/kl_coefficient"] == 0.02  # an actor that is held cannot come nearer to klTarget
        computed = {"actor/loss", "actor/entropy", "actor/approximate_kl", "learning_rate/actor", "gradient_norm/actor"}
        assert not computed & line.keys()

    whole, metrics, _ = run(job, range(4))
    late, of_late, _ = run(plain, range(2, 4))
    assert_equal(of_model(whole, "actor"), of_model(late, "actor"))
    assert [line["train/critic_only"] for line in metrics] == [1.0, 1.0, 0.0, 0.0]
    assert [line["actor/loss"] for line in metrics[2:]] == [line["actor/loss"] for line in of_late]
    assert "train/critic_only" not in of_late[0]


@pytest.mark.full
@pytest.mark.parametrize("stop", [1, 3])
def test_a_restart_within_and_after_the_warm_up_is_bitwise_exact(folder: Path, tmp_path: Path, stop: int) -> None:
    optimizer = {"learningRate": 1e-2, "schedule": "Cosine", "warmupSteps": 3, "weightDecay": 0.1}
    job = make_job(folder, folder, algorithm=WARMED, training={"optimizer": optimizer})
    straight, metrics, _ = run(job, range(4), pipeline=1)
    run(job, range(stop), pipeline=1, save=tmp_path)
    finish_folder(tmp_path, folder)
    resumed, after, _ = run(job, range(stop, 4), pipeline=1, restore=str(tmp_path))
    assert after == metrics[stop:]
    assert_bitwise(straight, resumed)


@pytest.mark.full
def test_a_fused_schedule_runs_what_it_has_of_the_critic(tmp_path: Path) -> None:
    """An iteration without the policy, with every table."""
    job = fused_job(tmp_path)
    body = job.model_dump(by_alias=True, exclude_none=True)
    body["spec"]["algorithm"]["ppo"]["criticWarmupIterations"] = 1
    warmed = RLHFJob.model_validate(body)
    assert_fused_and_split_train_the_bits_of_serial(warmed, 2, 1)


def test_no_pass_of_the_policy_runs_in_the_warm_up(folder: Path, tmp_path: Path) -> None:
    job = make_job(folder, folder, algorithm=WARMED)
    trainer = trainer_of(job, serial(job, 1, 1), 0, 1, Alone())
    spans: Any = trainer.spans  # type: ignore[attr-defined]
    exhaust(trainer.train(0, make_batch()))
    assert "train/critic/F" in spans
    assert not [name for name in spans if name.startswith("train/actor")]
    checkpoint.save(trainer, tmp_path, 1)
    moments = trainer.optimizers["actor", 0].state()
    assert all(not value.any() for value in moments.values())


def test_the_actors_rate_rises_from_its_own_first_step_until_it_meets_the_shape() -> None:
    fields = Optimizer.model_validate({"schedule": "Linear", "warmupSteps": 4})
    rates = [learning_rate(fields, 1.0, step, Horizon(12), 6) for step in range(6, 12)]
    assert rates == pytest.approx([0.25, 0.5, 0.5, 0.375, 0.25, 0.125])
    early = [learning_rate(fields, 1.0, step, Horizon(12), 1) for step in range(1, 6)]
    assert early == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.875])
