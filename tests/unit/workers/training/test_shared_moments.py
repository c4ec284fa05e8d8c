"""Copies that divide AdamW's moments train the same bits as copies with all of them; any layout reads their files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.training.fused_ranks import moments_of
from tests.support.training.training_ranks import (
    TWO_EPOCHS,
    assert_bitwise,
    finish_folder,
    make_job,
    run,
    weights_of,
)

from rlhf_api.job import RLHFJob
from rlhf_workers.failures import WorkError
from rlhf_workers.training.optimizers.shared_moments import MomentShares
from rlhf_workers.training.trainer import Trainer

LAYOUTS = [("torch", 1, 1, 2), ("torch", 1, 2, 2), ("torch", 1, 1, 4), ("megatron", 2, 1, 2), ("megatron", 2, 2, 2)]
"""Backend, tensor, pipeline, data."""

pytestmark = pytest.mark.usefixtures("megatron_group")


def job_of(policy: Path, backend: str, tensor: int, shared: bool, **training: Any) -> RLHFJob:
    parallelism = {"tensor": tensor, "shardOptimizer": shared}
    fields = {"microBatchSize": 1, "backend": backend, "parallelism": parallelism, **training}
    return make_job(policy, policy, training=fields, algorithm=TWO_EPOCHS)


def assert_same_moments(ours: list[Trainer], theirs: list[Trainer]) -> None:
    left, right = moments_of(ours), moments_of(theirs)
    assert left.keys() == right.keys()
    assert any(value.any() for value in right.values())
    assert [name for name in right if not torch.equal(left[name], right[name])] == []


def moment_values(trainer: Trainer) -> int:
    """Return the number of values in the moments of a rank."""
    return sum(value.numel() for optimizer in trainer.optimizers.values() for value in optimizer.moments())


@pytest.mark.full(quick=1)
@pytest.mark.parametrize(("backend", "tensor", "pipeline", "data"), LAYOUTS)
def test_weights_moments_and_metrics_are_those_of_copies_that_keep_all(
    backend: str, tensor: int, pipeline: int, data: int, policy: Path
) -> None:
    shared, metrics, _ = run(job_of(policy, backend, tensor, True), range(2), pipeline, data)
    apart, expected, _ = run(job_of(policy, backend, tensor, False), range(2), pipeline, data)
    assert_bitwise(shared, apart)
    assert metrics == expected
    assert_same_moments(shared, apart)
    assert sum(map(moment_values, shared)) * data == sum(map(moment_values, apart))
    assert max(map(moment_values, shared)) < 1.5 * max(map(moment_values, apart)) / data


@pytest.mark.full
def test_adapters_are_shared_out_too(policy: Path) -> None:
    jobs = [job_of(policy, "torch", 1, shared, lora={"rank": 4}) for shared in (True, False)]
    (shared, _, _), (apart, _, _) = (run(job, range(1), 1, 2) for job in jobs)
    assert_bitwise(shared, apart)
    assert_same_moments(shared, apart)


@pytest.mark.full
@pytest.mark.parametrize(("backend", "tensor", "pipeline", "data"), [LAYOUTS[1], LAYOUTS[3]])
def test_a_checkpoint_goes_from_shares_to_whole_moments_and_back_bit_by_bit(
    backend: str, tensor: int, pipeline: int, data: int, policy: Path, tmp_path: Path
) -> None:
    jobs = {shared: job_of(policy, backend, tensor, shared) for shared in (True, False)}
    begun, _, _ = run(jobs[True], range(1), pipeline, data, save=tmp_path / "0")
    finish_folder(tmp_path / "0", policy)
    assert len(list((tmp_path / "0" / "optimizer").glob("actor-*-data-00001.safetensors"))) == pipeline * tensor
    whole, _, _ = run(jobs[False], range(1, 1), pipeline, 1, restore=str(tmp_path / "0"), save=tmp_path / "1")
    assert weights_of(whole).keys() == weights_of(begun).keys()
    assert_same_moments(whole, begun)
    finish_folder(tmp_path / "1", policy)
    back, _, _ = run(jobs[True], range(1, 1), pipeline, data, restore=str(tmp_path / "1"))
    assert_same_moments(back, begun)
    resumed, again, _ = run(jobs[True], range(1, 2), pipeline, data, restore=str(tmp_path / "0"))
    straight, metrics, _ = run(jobs[True], range(2), pipeline, data)
    assert_bitwise(resumed, straight)
    assert again == metrics[1:]


def test_a_share_that_is_missing_is_named(policy: Path, tmp_path: Path) -> None:
    job = job_of(policy, "torch", 1, True)
    run(job, range(1), 1, 2, save=tmp_path)
    finish_folder(tmp_path, policy)
    (tmp_path / "optimizer" / "actor-stage-00000-data-00001.safetensors").unlink()
    with pytest.raises(WorkError, match=r"exp_avg is missing from actor-stage-00000-data-00000.safetensors"):
        run(job, range(1, 1), 1, 2, restore=str(tmp_path))


def test_every_parameter_is_stepped_by_one_copy_and_shares_are_near_equal() -> None:
    sizes = {"embedding": 900, **{f"layer-{number}": 300 for number in range(9)}, "norm": 1, "of-no-rows": 0}
    parameters = {name: torch.empty(size) for name, size in sizes.items()}
    of_each = [MomentShares((4, 6, 8), number).steppers(parameters) for number in range(3)]
    assert of_each[0] == of_each[1] == of_each[2], "every copy works out the same"
    assert of_each[0].keys() == set(sizes) - {"of-no-rows"}
    shares = [[name for name, copy in of_each[0].items() if copy == number] for number in range(3)]
    assert sorted(sum(sizes[name] for name in share) for share in shares) == [1200, 1200, 1201]
