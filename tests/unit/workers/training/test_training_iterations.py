"""Whole iterations: executed steps, determinism, exact resume, abstained samples, adaptive KL, failure messages."""

import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.support import algorithms
from tests.support.model_folders import models
from tests.support.training.training_ranks import (
    PPO_FIELDS,
    TWO_EPOCHS,
    Alone,
    ThreadCommunicator,
    assert_bitwise,
    exhaust,
    finish_folder,
    make_batch,
    make_job,
    make_samples,
    on_ranks,
    prepared,
    run,
    serial,
    trainer_of,
    weights_of,
)

from rlhf_api.algorithms.graph import SCORE_VALUES
from rlhf_common.arrays import pack
from rlhf_planner.schedule.serial import one_f_one_b
from rlhf_workers.failures import WorkError
from rlhf_workers.inference.scorers import load_scorer
from rlhf_workers.losses.group_advantages import group_advantages
from rlhf_workers.training.batches.training_batch import batch_from
from rlhf_workers.training.checkpoints import checkpoint
from rlhf_workers.training.trainer import Trainer
from rlhf_workers.weights import tensor_file


def test_two_runs_are_bitwise_equal_and_learn_something(folder: Path) -> None:
    job = make_job(folder, folder, algorithm=TWO_EPOCHS)
    first, metrics, _ = run(job, range(2), data=2, pipeline=1)
    second, again, _ = run(job, range(2), data=2, pipeline=1)
    assert metrics == again
    assert_bitwise(first, second)
    start = trainer_of(job, serial(job, 1, 1), 0, 1, Alone())
    moved = weights_of([start])
    assert all(not torch.equal(value, moved[name]) for name, value in weights_of(first).items())


def test_resuming_from_a_checkpoint_is_bitwise_exact(folder: Path, tmp_path: Path) -> None:
    optimizer = {"learningRate": 1e-2, "schedule": "Cosine", "warmupSteps": 3, "weightDecay": 0.1}
    job = make_job(folder, folder, algorithm=TWO_EPOCHS, training={"optimizer": optimizer})
    straight, metrics, _ = run(job, range(4))
    run(job, range(2), save=tmp_path)
    finish_folder(tmp_path, folder)
    resumed, after, _ = run(job, range(2, 4), restore=str(tmp_path))
    assert after == metrics[2:]
    assert_bitwise(straight, resumed)


def test_another_number_of_stages_reads_the_same_checkpoint(folder: Path, tmp_path: Path) -> None:
    job = make_job(folder, folder)
    two_stages, _, files = run(job, range(1), save=tmp_path)
    finish_folder(tmp_path, folder)
    one_stage, _, _ = run(job, range(1, 1), pipeline=1, restore=str(tmp_path))
    assert_bitwise(one_stage, two_stages)
    states = [
        {k: v for o in trainers for opt in o.optimizers.values() for k, v in opt.state().items()}
        for trainers in (one_stage, two_stages)
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert sorted(file.path for file in files) == [
        "actor/model-stage-00000.safetensors",
        "actor/model-stage-00001.safetensors",
        "critic/model-stage-00000.safetensors",
        "critic/model-stage-00001.safetensors",
        "optimizer/actor-stage-00000.safetensors",
        "optimizer/actor-stage-00001.safetensors",
        "optimizer/critic-stage-00000.safetensors",
        "optimizer/critic-stage-00001.safetensors",
        "trainer.json",
    ]


def test_checkpoint_files_are_what_they_are_said_to_be(folder: Path, tmp_path: Path) -> None:
    import hashlib

    job = make_job(folder, folder)
    _, _, files = run(job, range(1), data=2, pipeline=1, save=tmp_path)
    for file in files:
        content = (tmp_path / file.path).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (file.bytes, file.sha256)
        if file.model:
            assert set(load_file(tmp_path / file.path)) == set(file.parameters)
    assert not list(tmp_path.rglob("*.tmp"))
    assert len(files) == 5  # replica 1 has nothing to add


def test_1f1b_of_the_actor_and_then_of_the_critic_is_what_runs(folder: Path) -> None:
    trainers, _, _ = run(make_job(folder, folder), range(1))
    for stage, trainer in enumerate(trainers):
        spans: list[str] = trainer.spans  # type: ignore[attr-defined]
        ran = [name for name in spans if name.endswith(("/F", "/B"))]
        order = [kind for kind, _ in one_f_one_b(stage, 2, 4)]
        assert ran == [f"train/actor/{kind}" for kind in order] + [f"train/critic/{kind}" for kind in order]
        waits = [name for name in spans if "wait" in name]
        assert waits == ["train/actor/wait-" + "BF"[stage]] * 4 + ["train/critic/wait-" + "BF"[stage]] * 4


def test_metrics_say_what_happened(folder: Path) -> None:
    _, (first, second), _ = run(make_job(folder, folder, algorithm=TWO_EPOCHS), range(2))
    assert first["train/skipped_steps"] == 0
    assert first["actor/mismatch"] > 0.1  # these log-probabilities were made up
    assert first["actor/mismatch_max"] >= first["actor/mismatch"]
    assert first["actor/mismatch_kl"] > 0.001
    assert 0 < first["actor/clip_fraction"] <= 1
    sides = first["actor/clip_fraction_low"] + first["actor/clip_fraction_high"]
    assert sides == pytest.approx(first["actor/clip_fraction"])
    terms = (first[f"actor/{term}_loss"] for term in ("policy", "kl", "entropy"))
    assert sum(terms) == pytest.approx(first["actor/loss"])
    assert 0 < first["actor/entropy"] < 4  # nats over 50 tokens
    assert first["critic/loss"] > 0
    assert first["critic/explained_variance"] < 1
    assert (first["learning_rate/actor"], first["learning_rate/critic"]) == (1e-2, 9e-6)
    assert first["gradient_norm/actor"] > 0
    assert first["response_length/mean"] > 3
    assert first["actor/kl_coefficient"] == 0.02
    error = min(max(first["actor/kl"] / 2.0 - 1, -0.2), 0.2)
    assert second["actor/kl_coefficient"] == pytest.approx(0.02 * (1 + error * 8 / 50))


def test_the_learning_rate_shown_is_that_of_the_last_step(folder: Path) -> None:
    optimizer = {"learningRate": 1e-2, "schedule": "Linear"}
    _, metrics, _ = run(make_job(folder, folder, training={"optimizer": optimizer}), range(4))
    assert [line["learning_rate/actor"] for line in metrics] == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])


@pytest.mark.full
def test_more_iterations_in_a_live_job_bend_the_rate_and_a_restart_goes_on_with_it(
    folder: Path, tmp_path: Path
) -> None:
    """4 iterations become 8 after the second: 1, 3/4, then 1/2 falls over the remaining six.

    A restored rank with a manifest of 8 gets each iteration's own total and has the same rates.
    """
    optimizer = {"learningRate": 1e-2, "schedule": "Linear"}
    job = make_job(folder, folder, training={"optimizer": optimizer})

    def rates(trainer: Trainer, totals: dict[int, int]) -> list[float]:
        metrics = [exhaust(trainer.train(i, make_batch(seed=i), total)) for i, total in totals.items()]
        return [line["learning_rate/actor"] / 1e-2 for line in metrics]

    trainer = trainer_of(job, serial(job, 1, 1), 0, 1, Alone())
    assert rates(trainer, {0: 4}) == [1.0]
    checkpoint.save(trainer, tmp_path, 1)
    finish_folder(tmp_path, folder)
    rest = {1: 4, 2: 8, 3: 8, 7: 8}
    bent = rates(trainer, rest)
    assert bent == pytest.approx([0.75, 0.5, 0.5 * 5 / 6, 0.5 * 4 / 6])
    longer = make_job(folder, folder, training={"optimizer": optimizer}, iterations=8)
    again = trainer_of(longer, serial(longer, 1, 1), 0, 1, Alone(), str(tmp_path), 1)
    assert rates(again, rest) == bent
    assert_bitwise([trainer], [again])


def test_a_critic_that_starts_from_a_reward_model_keeps_its_head(folder: Path, tmp_path: Path) -> None:
    """On the ranks and where values are scored alike."""
    reward = models.write_reward_model(tmp_path / "reward", "qwen2", seed=3)
    head = load_file(reward / "model.safetensors")["score.weight"]
    assert head.abs().sum() > 0
    job = make_job(folder, reward)
    trainer = trainer_of(job, serial(job, 1, 1), 0, 1, Alone())
    assert torch.equal(trainer.stages["critic", 0].value_head.weight, head)
    scorer: Any = load_scorer(SCORE_VALUES, job.spec, torch.device("cpu"))
    assert torch.equal(scorer.model.value_head.weight, head)


def test_log_probabilities_of_the_policy_itself_show_no_mismatch(folder: Path) -> None:
    """transformers computes the log-probabilities: ratio 1, no clipping, at the first mini-batch."""
    import transformers

    job = make_job(folder, folder)
    batch = make_batch()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    result = torch.zeros_like(batch.fields["log_probabilities"])
    for row, prompt in enumerate(batch.prompts):
        response = batch.responses[row, : batch.response_lengths[row]]
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1].detach() / 0.8
        result[row, : len(response)] = torch.log_softmax(logits, -1)[torch.arange(len(response)), response]
    trainer = trainer_of(job, serial(job, 1, 1), 0, 1, Alone())
    metrics = exhaust(trainer.train(0, batch.with_fields(log_probabilities=result)))
    assert metrics["actor/mismatch_max"] < 1e-5
    assert 0 <= metrics["actor/mismatch_kl"] < 1e-9
    assert metrics["actor/clip_fraction"] == 0
    assert metrics["actor/approximate_kl"] == pytest.approx(0, abs=1e-9)


def test_a_batch_in_which_everyone_abstained_changes_no_weight(folder: Path) -> None:
    job = make_job(folder, folder, algorithm=TWO_EPOCHS)
    trainer = trainer_of(job, serial(job, 1, 1), 0, 1, Alone())
    before = {name: value.clone() for name, value in weights_of([trainer]).items()}
    metrics = exhaust(trainer.train(0, make_batch(abstained=range(8))))
    assert metrics["train/skipped_steps"] == 4
    assert metrics["reward/abstained"] == 8
    assert "reward/mean" not in metrics
    assert all(torch.equal(before[name], value) for name, value in weights_of([trainer]).items())


def test_an_abstained_sample_does_not_change_the_gradient_of_the_others(folder: Path) -> None:
    """Its advantage, its tokens and its weight in the mean are absent; another sample in its position changes
    nothing."""
    job = make_job(folder, folder)
    batch, other = make_batch(abstained=(2,)), make_batch(abstained=(2,))
    other.responses[2] = 7
    other.fields["values"][2] = 99.0
    other.fields["reference_log_probabilities"][2] = -99.0
    ready, changed = (prepared(job, item) for item in (batch, other))
    for name in ("advantages", "returns"):
        assert torch.equal(ready.fields[name], changed.fields[name])
        assert (ready.fields[name][2] == 0).all()


@pytest.mark.full
def test_a_sample_that_failed_has_no_response_and_is_trained_on_as_if_it_had_abstained(folder: Path) -> None:
    """One sample per micro-batch, so that lengths have no effect: weights are the same bits."""
    job = make_job(folder, folder, training={"microBatchSize": 1})
    weights = []
    for response in (False, True):
        samples = make_samples(abstained=(2,))
        if not response:
            samples[2].response.CopyFrom(pack(np.zeros(0, np.int32)))
            samples[2].fields.clear()
            samples[2].fields["log_probabilities"].CopyFrom(pack(np.zeros(0, np.float32)))
        trainer = trainer_of(job, serial(job, 1, 1), 0, 1, Alone())
        exhaust(trainer.train(0, batch_from(samples, 8, PPO_FIELDS)))
        weights.append(weights_of([trainer]))
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_grpo_trains_the_actor_alone(folder: Path) -> None:
    job = make_job(folder, algorithm={"grpo": {"miniBatchSize": 8, "groupSize": 4}})
    batch = make_batch()
    ready = prepared(job, batch)
    expected = group_advantages(batch.rewards, batch.groups, batch.valid, scale=True)
    assert torch.equal(ready.fields["advantages"][:, 0], expected)

    def work(rank: int, peers: ThreadCommunicator) -> dict[str, float]:
        trainer = trainer_of(job, serial(job, 2, 1, models=("actor",)), rank, 2, peers)
        return exhaust(trainer.train(0, batch))

    metrics, _ = on_ranks(2, work)
    assert not [name for name in metrics if name.startswith("critic")]
    assert metrics["gradient_norm/actor"] > 0


def test_a_mini_batch_that_does_not_fit_the_schedule_names_the_field(folder: Path) -> None:
    job = make_job(folder, folder)
    wrong = serial(job, 1, 1).model_copy(
        update={"pipelines": tuple(p.model_copy(update={"microbatches": 3}) for p in serial(job, 1, 1).pipelines)}
    )
    with pytest.raises(WorkError, match=r"spec.algorithm.ppo.miniBatchSize: 8 does not divide into the 3"):
        trainer_of(job, wrong, 0, 1, Alone())


# ---------------------------------------------------------------- storage


@pytest.fixture
def small_files() -> Iterator[None]:
    """Limit files of this process to 100 KB, like a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_files")
def test_a_full_disk_leaves_no_half_file_and_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(WorkError, match=r"spec.checkpoints.path: writing .*free space") as caught:
        tensor_file.write_tensors(tmp_path, "actor/model.safetensors", {"w": torch.zeros(100_000)}, "actor")
    failure = caught.value.failure
    assert (failure.reason, failure.field, failure.exit_code) == ("StorageFull", "spec.checkpoints.path", 23)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "actor").write_text("a file where a folder is needed")
    with pytest.raises(WorkError, match=r"spec.checkpoints.path: writing .*actor/model") as caught:
        tensor_file.write_tensors(tmp_path, "actor/model.safetensors", {"w": torch.zeros(3)}, "actor")
    assert (caught.value.failure.reason, caught.value.failure.exit_code) == ("StorageDenied", 23)


@pytest.mark.full(quick=2)
@pytest.mark.parametrize("damage", ["truncate", "missing", "shape", "state", "list", "horizon"])
def test_a_damaged_checkpoint_is_named(folder: Path, tmp_path: Path, damage: str) -> None:
    job = make_job(folder, folder)
    run(job, range(0), pipeline=1, save=tmp_path)
    finish_folder(tmp_path, folder)
    file = tmp_path / "actor" / "model-stage-00000.safetensors"
    if damage == "truncate":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "missing":
        file.unlink()
    elif damage == "shape":
        tensors = {**load_file(file), "model.norm.weight": torch.zeros(3)}
        tensor_file.write_tensors(tmp_path, "actor/model-stage-00000.safetensors", tensors, "actor")
    else:
        state = {"version": 0, "steps": 0, "klCoefficient": 0.1, "horizon": {"far": 1}}
        (tmp_path / "trainer.json").write_text({"list": "[]", "horizon": json.dumps(state)}.get(damage, "{}"))
    expected = {
        "truncate": "truncated or damaged",
        "missing": "missing",
        "shape": r"shape \[3\]",
        "state": "trainer.json",
        "list": "trainer.json",
        "horizon": "trainer.json",
    }
    with pytest.raises(WorkError, match=expected[damage]) as caught:
        trainer_of(job, serial(job, 1, 1), 0, 1, Alone(), str(tmp_path), 0)
    assert caught.value.failure.exit_code == 21


def test_a_training_that_failed_before_its_first_step_changes_nothing_that_the_algorithm_remembers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(folder, algorithm=algorithms.member("plugin"))
    trainer = trainer_of(job, serial(job, 1, 1, models=("actor",)), 0, 1, Alone())
    exhaust(trainer.train(0, make_batch()))
    before = trainer.algorithm.state()

    def fails(*arguments: Any) -> Any:
        raise RuntimeError("lost")

    monkeypatch.setattr(trainer, "mini_batch", fails)
    with pytest.raises(RuntimeError, match="lost"):
        exhaust(trainer.train(1, make_batch(seed=5)))
    assert trainer.algorithm.state() == before
    assert before["baseline"] is not None
