"""Actor and critic with layers split over different numbers of the same ranks: results equal those of one rank.

Compares gradients, metrics, checkpoints and schedules.
"""

from pathlib import Path
from typing import Any

import pytest
from tests.support.model_folders import models
from tests.support.training.fused_ranks import assert_fused_and_split_train_the_bits_of_serial, fused_job
from tests.support.training.gradient_comparison import assert_same_gradients
from tests.support.training.tensor_ranks import HEADS, critic_of, whole_moments, write_critic
from tests.support.training.training_ranks import (
    TWO_EPOCHS,
    ThreadCommunicator,
    assert_bitwise,
    exhaust,
    finish_folder,
    gradients_of,
    make_batch,
    make_job,
    on_ranks,
    run,
    serial,
    trainer_of,
    weights_of,
)

from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_workers.failures import WorkError
from rlhf_workers.training.backends.torch_backend import TorchBackend
from rlhf_workers.training.schedule.step_timing import measure
from rlhf_workers.training.trainer import Trainer

TOLERANCE = 1e-5
"""Tolerance relative to the largest number of a tensor: float32 sums in another order."""
SIZES = [(2, 1, 1, 1), (2, 1, 2, 1), (1, 2, 2, 1), (1, 2, 4, 1), (4, 1, 1, 1), (4, 2, 1, 2), (2, 4, 2, 1), (1, 2, 2, 2)]
"""Ranks of the actor's and of the critic's tensor groups, stages of the actor, copies."""

pytestmark = pytest.mark.usefixtures("megatron_group")


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Policies of two families; one uses its embedding as head."""
    tied = {"tie_word_embeddings": True} if request.param == "qwen3" else {}
    folder = models.write_policy(
        tmp_path_factory.mktemp("models") / request.param, request.param, seed=1, **HEADS, **tied
    )
    write_critic(folder)
    return folder


def job_of(policy: Path, tensor: int, critic: int | None, sequence: str = "Disabled", **spec: Any) -> RLHFJob:
    parallelism = {"tensor": tensor, "criticTensor": critic, "sequenceParallel": sequence}
    training = {"backend": "megatron", "parallelism": parallelism, **spec.pop("training", {})}
    return make_job(policy, critic_of(policy), training=training, **spec)


@pytest.mark.full(quick=1)
@pytest.mark.parametrize(("tensor", "critic", "pipeline", "data"), SIZES)
def test_gradients_are_those_of_one_rank(tensor: int, critic: int, pipeline: int, data: int, policy: Path) -> None:
    theirs = make_job(policy, critic_of(policy), training={"backend": "torch"})
    ours, batch = job_of(policy, tensor, critic), make_batch(abstained=(3,))
    expected = gradients_of(theirs, serial(theirs, 1, 1), 1, batch)
    assert all(value.any() for name, value in expected.items() if name.startswith("critic:model.layers"))
    got = gradients_of(ours, serial(ours, pipeline, data), pipeline * data * tensor, batch)
    assert_same_gradients(got, expected, TOLERANCE)


@pytest.mark.full(quick=1)
@pytest.mark.parametrize(("critic", "pipeline"), [(1, 1), (2, 1), (2, 2)])
def test_states_divided_by_position_change_no_gradient(critic: int, pipeline: int, policy: Path) -> None:
    """Each model's states are divided over its own ranks; those of a critic on one rank are not divided."""
    theirs = make_job(policy, critic_of(policy), training={"backend": "torch"})
    ours, batch = job_of(policy, 4, critic, "Enabled"), make_batch(abstained=(3,))
    expected = gradients_of(theirs, serial(theirs, 1, 1), 1, batch)
    got = gradients_of(ours, serial(ours, pipeline, 1), pipeline * 4, batch)
    assert_same_gradients(got, expected, TOLERANCE)


@pytest.mark.full(quick=1)
@pytest.mark.parametrize(
    ("tensor", "critic", "pipeline", "data", "algorithm"),
    [
        (2, 1, 1, 1, TWO_EPOCHS),
        (1, 2, 2, 2, TWO_EPOCHS),
        (4, 1, 1, 1, {"ppo": {"miniBatchSize": 8, "oldLogProbabilities": "Trainer"}}),
        (1, 2, 2, 1, {"ppo": {"miniBatchSize": 8, "oldLogProbabilities": "Trainer"}}),
    ],
)
def test_losses_and_norms_are_those_of_one_rank(
    tensor: int, critic: int, pipeline: int, data: int, algorithm: dict[str, Any], policy: Path
) -> None:
    """Replicated parameters, and samples that all ranks of a group see, count once."""
    ours = job_of(policy, tensor, critic, training={"microBatchSize": 1}, algorithm=algorithm)
    training = {"microBatchSize": 1, "backend": "torch"}
    theirs = make_job(policy, critic_of(policy), training=training, algorithm=algorithm)
    _, metrics, _ = run(ours, range(1), pipeline, data)
    _, expected, _ = run(theirs, range(1), 1, 1)
    assert metrics[0].keys() == expected[0].keys()
    assert metrics[0] == pytest.approx(expected[0], rel=1e-4, abs=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("tensor", "critic", "pipeline", "data", "sequence"),
    [
        *((*sizes, "Disabled") for sizes in ((2, 1, 2, 1), (1, 2, 4, 1), (4, 1, 2, 1), (2, 1, 2, 2))),
        (2, 1, 2, 1, "Enabled"),
    ],
)
def test_fused_and_split_train_the_same_bits_as_serial(
    tensor: int, critic: int, pipeline: int, data: int, sequence: str, tmp_path: Path
) -> None:
    layers = pipeline * tensor
    body = fused_job(tmp_path, key_value_heads=4, critic_layers=layers + 1).model_dump(
        by_alias=True, exclude_unset=True
    )
    parallelism = {"tensor": tensor, "criticTensor": critic, "sequenceParallel": sequence}
    body["spec"]["training"] |= {"backend": "megatron", "parallelism": parallelism}
    assert_fused_and_split_train_the_bits_of_serial(RLHFJob.model_validate(body), pipeline, data)


@pytest.mark.full(quick=1)
def test_the_field_as_tensor_trains_the_bits_of_a_job_without_it(policy: Path) -> None:
    without, _, _ = run(job_of(policy, 2, None), range(1), 2)
    with_field, _, _ = run(job_of(policy, 2, 2), range(1), 2)
    assert_bitwise(with_field, without)


@pytest.mark.full(quick=1)
def test_micro_batches_bounded_by_tokens_change_no_gradient(policy: Path) -> None:
    """The table is rebuilt for each mini-batch's number of micro-batches, with the same rows."""
    training = {"microBatchSize": 8, "microBatchTokens": 40}
    parallelism = {"tensor": 2, "criticTensor": 1}
    theirs = make_job(policy, critic_of(policy), training={"backend": "torch"})
    ours = job_of(policy, 2, 1, training={**training, "parallelism": parallelism})
    batch = make_batch(abstained=(3,))
    expected = gradients_of(theirs, serial(theirs, 1, 1), 1, batch)
    got = gradients_of(ours, serial(ours, 2, 1), 4, batch)
    assert_same_gradients(got, expected, TOLERANCE)


@pytest.mark.full(quick=1)
def test_the_policy_may_train_before_the_critic(policy: Path) -> None:
    job = job_of(policy, 2, 1)
    table = serial(job, 1, 1)

    def trained(policy_first: bool) -> list[Trainer]:
        def work(rank: int, peers: ThreadCommunicator) -> Trainer:
            trainer = trainer_of(job, table, rank, 2, peers)
            exhaust(trainer.train(0, make_batch(), policy_first=policy_first))
            return trainer

        return on_ranks(2, work)

    assert_bitwise(trained(True), trained(False))


@pytest.mark.full
def test_a_checkpoint_is_read_by_every_layout_bit_by_bit(policy: Path, tmp_path: Path) -> None:
    """Written and read with different sizes, one rank, other sizes, equal sizes, the backend torch, and back."""
    start, plain = job_of(policy, 2, 1), make_job(policy, critic_of(policy), training={"backend": "torch"})
    trained, _, files = run(start, range(1), pipeline=2, save=tmp_path / "0")
    assert len({file.path for file in files}) == len(files), "two ranks wrote one file"
    finish_folder(tmp_path / "0", policy, critic_of(policy))
    weights, moments = weights_of(trained), whole_moments(tmp_path / "0")
    assert any(value.any() for value in moments.values())
    unsplit, split, same = job_of(policy, 1, 1), job_of(policy, 1, 4), job_of(policy, 4, None)
    layouts = [(unsplit, 1, 1), (split, 4, 1), (same, 1, 1), (plain, 2, 1), (start, 1, 2), (split, 4, 1), (start, 2, 1)]
    for number, (job, pipeline, data) in enumerate(layouts, 1):
        folder = tmp_path / str(number)
        read, _, _ = run(job, range(1, 1), pipeline, data, restore=str(tmp_path / str(number - 1)), save=folder)
        finish_folder(folder, policy, critic_of(policy))
        for ours, theirs in ((weights_of(read), weights), (whole_moments(folder), moments)):
            assert ours.keys() == theirs.keys()
            assert [name for name in theirs if not ours[name].equal(theirs[name])] == []


@pytest.mark.full
@pytest.mark.parametrize("shared_out", [False, True])
def test_a_group_that_comes_back_trains_the_bits_of_one_that_was_not_lost(
    shared_out: bool, policy: Path, tmp_path: Path
) -> None:
    parallelism = {"tensor": 2, "criticTensor": 1, "shardOptimizer": shared_out}
    job = job_of(policy, 2, 1, training={"parallelism": parallelism})
    run(job, range(1), 1, 2, save=tmp_path)
    finish_folder(tmp_path, policy, critic_of(policy))
    resumed, again, _ = run(job, range(1, 2), 1, 2, restore=str(tmp_path))
    straight, metrics, _ = run(job, range(2), 1, 2)
    assert_bitwise(resumed, straight)
    assert again == metrics[1:]


@pytest.mark.full(quick=1)
@pytest.mark.parametrize(("tensor", "critic", "pipeline"), [(2, 1, 1), (1, 2, 2)])
def test_every_tensor_is_published_by_one_rank_of_the_first_copy(
    tensor: int, critic: int, pipeline: int, policy: Path
) -> None:
    job, block = job_of(policy, tensor, critic), tensor * pipeline
    table = serial(job, pipeline, 2)
    trainers = on_ranks(2 * block, lambda rank, peers: trainer_of(job, table, rank, 2 * block, peers))
    for model in ("actor", "critic"):
        found = [dict(TorchBackend(trainer).published(model)) for trainer in trainers]
        whole = {name for tensors in found for name in tensors}
        assert sum(map(len, found[:block])) == len(whole), "no tensor is there twice"
        assert {f"{model}:{name}" for name in whole} == {
            name for name in weights_of(trainers) if name.startswith(f"{model}:")
        }


@pytest.mark.full
def test_measuring_takes_all_ranks_of_a_group_and_changes_no_weight(policy: Path) -> None:
    job = job_of(policy, 2, 1)
    table = serial(job, 2, 1)

    def work(rank: int, peers: ThreadCommunicator) -> tuple[Trainer, pb.MeasureResult]:
        trainer = trainer_of(job, table, rank, 4, peers)
        result = exhaust(measure(trainer, pb.Measure(measurement_id=1)))
        exhaust(measure(trainer, pb.Measure(measurement_id=2, schedules=[table.model_dump_json()], rounds=1)))
        return trainer, result

    results = on_ranks(4, work)
    for trainer, result in results:
        assert {(cost.model, cost.stage) for cost in result.stages} == set(trainer.layout.local_stages)
    pairs = {(transfer.rank, transfer.peer) for _, result in results for transfer in result.transfers}
    assert pairs == {(0, 1), (1, 2), (2, 3)}
    before = on_ranks(4, lambda rank, peers: trainer_of(job, table, rank, 4, peers))
    assert_bitwise([trainer for trainer, _ in results], before)


@pytest.mark.full(quick=1)
def test_heads_of_a_critic_that_do_not_divide_are_refused_by_its_field(policy: Path) -> None:
    job = job_of(policy, 4, 8)
    with pytest.raises(
        WorkError, match=r"criticTensor: 8: the model of spec\.models\.critic\.path has 4 key-value heads"
    ):
        on_ranks(8, lambda rank, peers: trainer_of(job, serial(job, 2, 1), rank, 8, peers))
