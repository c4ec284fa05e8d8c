"""Training under serial, fused and split tables on ranks that are threads, and what must be equal between them."""

from collections.abc import Sequence
from pathlib import Path

import torch
from tests.support.model_folders import models
from tests.support.training.training_ranks import (
    ThreadCommunicator,
    exhaust,
    make_batch,
    make_job,
    on_ranks,
    serial,
    tensors_of,
    trainer_of,
    weights_of,
)

from rlhf_api.job import RLHFJob
from rlhf_common.schedule import ScheduleTable
from rlhf_planner.schedule.candidate_tables import (
    StageCost,
    coarse,
    exact_instance,
    forecast,
    search_options,
    table_of,
    table_of_rows,
)
from rlhf_planner.schedule.methods import FUSED, FUSED_SPLIT, placed
from rlhf_planner.schedule.report import solution_json
from rlhf_planner.schedule.row_simulation import widest
from rlhf_planner.schedule.serial import serial_table
from rlhf_planner.schedule.solve import solve
from rlhf_workers.training.checkpoints import checkpoint
from rlhf_workers.training.trainer import Trainer


def fused_job(root: Path, key_value_heads: int = 2, critic_layers: int = 5) -> RLHFJob:
    """Return a job with actor and critic of different family, depth and width; 2 optimizer steps per iteration."""
    heads = {"num_key_value_heads": key_value_heads}
    actor = models.write_policy(root / "actor", "qwen2", seed=1, num_hidden_layers=4, **heads)
    critic = models.write_policy(
        root / "critic", "llama", seed=2, num_hidden_layers=critic_layers, hidden_size=48, **heads
    )
    return make_job(
        actor,
        critic,
        algorithm={"ppo": {"miniBatchSize": 8, "epochs": 2, "klTarget": 2.0}},
        training={"microBatchSize": 1},
        rollout={"batchSize": 8, "temperature": 0.8, "maxPromptTokens": 12, "maxResponseTokens": 24},
    )


def fused_table(job: RLHFJob, pipeline: int, data: int, method: str) -> ScheduleTable:
    """Return the table that the search finds for invented times: a critic slower than the actor, and unequal stages."""
    block = pipeline * job.spec.training.parallelism.tensor
    pipes = placed(tensors_of(job), block, 8 // data, alternate=True)
    costs = {
        (model, stage): StageCost(0.02 * scale, 0.045 * scale, 0.02 * scale, 0.03 * scale, 1000.0)
        for model, factor in (("actor", 1.0), ("critic", 1.4))
        for stage in range(block)
        for scale in (factor * (1 + 0.1 * stage),)
    }
    transfers = {(rank, rank + 1): 0.002 for rank in range(block - 1)}
    if widest(pipes) > 1:
        table = table_of_rows(pipes, costs, transfers, method)
        assert forecast(table, costs, transfers)[0] < forecast(serial_table(pipes), costs, transfers)[0]
        return table
    asked = coarse(exact_instance(pipes, costs, transfers, method == FUSED_SPLIT))
    solution = solve(asked, search_options(method, 0.2), iter(range(1000)).__next__)
    table = table_of(asked, pipes, solution_json(solution), method)
    serial_seconds, fused_seconds = (forecast(item, costs, transfers)[0] for item in (serial_table(pipes), table))
    assert fused_seconds < serial_seconds
    return table


Trained = tuple[Trainer, list[dict[str, float]]]


def train(
    job: RLHFJob, table: ScheduleTable, data: int, iterations: range, restore: str = "", save: Path | None = None
) -> list[Trained]:
    world = data * len(table.rows) * min(tensors_of(job).values())

    def work(rank: int, peers: ThreadCommunicator) -> Trained:
        trainer = trainer_of(job, table, rank, world, peers, restore, iterations.start)
        metrics = [exhaust(trainer.train(i, make_batch(seed=i))) for i in iterations]
        if save is not None:
            checkpoint.save(trainer, save, iterations.stop)
        return trainer, metrics

    return on_ranks(world, work)


def moments_of(trainers: Sequence[Trainer]) -> dict[str, torch.Tensor]:
    return {
        f"{model}:{name}": value
        for trainer in trainers
        for (model, _), optimizer in trainer.optimizers.items()
        for name, value in optimizer.state().items()
    }


def assert_bitwise(ours: list[Trained], theirs: list[Trained]) -> None:
    for state in (weights_of, moments_of):
        left, right = (state([trainer for trainer, _ in side]) for side in (ours, theirs))
        assert left.keys() == right.keys()
        assert [name for name in left if not torch.equal(left[name], right[name])] == []
    assert ours[0][1] == theirs[0][1]


def assert_fused_and_split_train_the_bits_of_serial(job: RLHFJob, pipeline: int, data: int) -> None:
    off = train(job, serial(job, pipeline, data), data, range(1))
    for method in (FUSED, FUSED_SPLIT):
        table = fused_table(job, pipeline, data, method)
        kinds = {action.kind for row in table.rows for action in row}
        assert ("W" in kinds) == (method == FUSED_SPLIT)
        assert_bitwise(train(job, table, data, range(1)), off)
