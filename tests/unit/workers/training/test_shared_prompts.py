"""Rows in which responses share a prompt: gradients equal those of one sample at a time.

The oracle is transformers' own model on one unpadded sample at a time (`plain_gradients`). Tolerance: 1e-5 relative to
the largest gradient entry of the parameter.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.model_folders import models
from tests.support.training.gradient_comparison import (
    OF_WHOLE_RESPONSES,
    algorithm_gradients,
    assert_same_gradients,
    plain_gradients,
)
from tests.support.training.training_ranks import (
    Alone,
    exhaust,
    gradients_of,
    interleave,
    make_batch,
    make_job,
    serial,
    split_backward,
    trainer_of,
)

from rlhf_api.job import RLHFJob
from rlhf_planner.schedule.methods import opposite
from rlhf_workers.training.batches.training_batch import OLD_FIELD, TrainingBatch, micro_batch
from rlhf_workers.training.schedule.step_timing import made_up_batch

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "mixtral", "qwen3_moe")
TOLERANCE = 1e-5
LONG, SHORT = 2 * models.WINDOW + 3, 2
"""Tokens of two prompts. Through a window, responses see only the end of the first one."""


def group_batch(algorithm: str = "ppo", **arguments: Any) -> TrainingBatch:
    """Return eight samples of two prompts, four each."""
    batch = make_batch(algorithm, **arguments)
    prompts = [torch.arange(3, 3 + LONG) % 37 + 3, torch.arange(7, 7 + SHORT)]
    return replace(batch, prompts=tuple(prompts[sample // 4] for sample in range(len(batch.prompts))))


def sharing(folder: Path, training: dict[str, Any] | None = None, **spec: Any) -> RLHFJob:
    shared = {"microBatchSize": 4, "packing": True, "sharedPrompts": "Enabled", **(training or {})}
    return make_job(folder, folder, training=shared, **spec)


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_shared_prompt_gives_the_gradients_of_one_sample_at_a_time(
    family: str, stages: int, deterministic: bool, folders: dict[str, Path]
) -> None:
    """A policy and a value model train with eager attention and the fused kernel, within and beyond windows."""
    job, batch = sharing(folders[family], deterministic=deterministic), group_batch(abstained=(3,))
    ours = gradients_of(job, serial(job, stages, 1), stages, batch)
    assert_same_gradients(ours, plain_gradients(job, batch), TOLERANCE)


@pytest.mark.full(quick=1)
@pytest.mark.parametrize(
    "training",
    [
        {"microBatchTokens": 50},
        {"microBatchTokens": 1},
        {"microBatchSize": 8},
        {"microBatchSize": 2},
        {"activationCheckpointing": True},
        {"sharedPrompts": "Auto"},
    ],
)
def test_sharing_gives_the_gradients_of_whole_samples(training: dict[str, Any], folders: dict[str, Path]) -> None:
    """With a group in one row, and parted by samples, by tokens, and over replicas."""
    batch, whole = group_batch(), sharing(folders["mistral"], {"sharedPrompts": "Disabled"})
    expected = gradients_of(whole, serial(whole, 1, 1), 1, batch)
    job = sharing(folders["mistral"], training)
    for pipeline, data in ((1, 1), (2, 1), (1, 2), (2, 2)):
        if data * job.spec.training.micro_batch_size <= 8:
            ours = gradients_of(job, serial(job, pipeline, data), pipeline * data, batch)
            assert_same_gradients(ours, expected, TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_tables_and_a_split_backward_give_the_same(family: str, folders: dict[str, Path]) -> None:
    job, batch = sharing(folders[family]), group_batch()
    table = serial(job, 2, 1)
    expected = gradients_of(job, table, 2, batch)
    fused = interleave(opposite(("actor", "critic"), 2, 2))
    for other in (fused, split_backward(fused), split_backward(table)):
        assert_same_gradients(gradients_of(job, other, 2, batch), expected, 2e-6)


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("algorithm", OF_WHOLE_RESPONSES)
def test_objectives_of_whole_responses_and_of_pairs_have_the_gradients_of_whole_samples(
    algorithm: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    batch = group_batch(algorithm)
    batch.mask[1, 1:], batch.mask[6, :] = False, False  # one trained token; none
    found = [
        algorithm_gradients(
            algorithm, folders["qwen3"], tmp_path, 2, batch=batch, packing=True, sharedPrompts=mode
        )
        for mode in ("Enabled", "Disabled")
    ]  # fmt: skip
    assert any(gradient.any() for gradient in found[0].values())
    assert_same_gradients(found[0], found[1], TOLERANCE)


@pytest.mark.full
def test_adapters_and_a_draft_model_have_the_same_gradients(folders: dict[str, Path], tmp_path: Path) -> None:
    draft = models.write_policy(tmp_path / "draft", "llama", seed=9, num_hidden_layers=1, hidden_size=16)
    speculation = {"drafters": ["Model"], "draftModel": {"path": str(draft), "train": "Enabled"}}
    found = list[dict[str, torch.Tensor]]()
    for mode in ("Enabled", "Disabled"):
        training = {"sharedPrompts": mode, "lora": {"rank": 4}}
        job = sharing(folders["qwen2"], training, generation={"speculation": speculation})
        trainer = trainer_of(job, serial(job, 1, 1), 0, 1, Alone())
        assert trainer.draft is not None
        assert trainer.draft.optimizer is not None
        optimizers = {f"{key}": optimizer for key, optimizer in trainer.optimizers.items()}
        optimizers["draft"] = trainer.draft.optimizer
        for optimizer in optimizers.values():
            optimizer.step = lambda *_: None  # type: ignore[method-assign]
        next(trainer.train(0, group_batch()))
        found.append({name: optimizer.gradients.clone() for name, optimizer in optimizers.items()})
    assert all(gradient.any() for gradient in found[0].values())
    assert_same_gradients(found[0], found[1], TOLERANCE)


def test_no_response_sees_another_and_all_see_the_prompt(folders: dict[str, Path]) -> None:
    job, batch = sharing(folders["mistral"]), group_batch()
    stage = trainer_of(job, serial(job, 1, 1), 0, 1, Alone()).stages["actor", 0]
    row = micro_batch(batch, [0, 1, 2], {}, packed=True, prompts=batch.prompt_table)
    assert row.packed is not None
    (segment,) = row.packed
    second = slice(LONG + segment.responses[0], LONG + sum(segment.responses[:2]))

    def states(changed: slice) -> torch.Tensor:
        tokens = row.tokens.clone()
        tokens[:, changed] += 1
        result: torch.Tensor = stage(stage.embed(tokens), row.packed)
        return result[0]

    original = states(slice(0, 0))
    others = torch.ones(len(original), dtype=torch.bool)
    others[second] = False
    assert torch.equal(original[others], states(second)[others])
    assert not torch.equal(original[second], states(second)[second])
    assert (original != states(slice(LONG - 1, LONG)))[LONG - 1 :].any(dim=1).all()


def test_the_first_pass_shares_prompts_as_well(folders: dict[str, Path]) -> None:
    batch, found = group_batch(), {}
    for mode in ("Enabled", "Disabled"):
        fields = {"ppo": {"miniBatchSize": 8, "oldLogProbabilities": "Trainer"}}
        job = sharing(folders["gemma2"], {"sharedPrompts": mode}, algorithm=fields)
        trainer = trainer_of(job, serial(job, 1, 1), 0, 1, Alone())
        assert trainer._old_logprobs is not None
        found[mode] = exhaust(trainer._old_logprobs.added_to(0, batch, trainer.layout)).fields[OLD_FIELD]
    assert torch.allclose(found["Enabled"], found["Disabled"], rtol=1e-5, atol=1e-6)
    assert found["Enabled"].any()


def test_a_response_without_a_token_is_no_obstacle(folders: dict[str, Path]) -> None:
    batch = group_batch(abstained=(2,))
    lengths, mask = batch.response_lengths.clone(), batch.mask.clone()
    lengths[2] = 0
    empty = replace(batch, response_lengths=lengths, mask=mask)
    for deterministic in (True, False):
        ways: tuple[dict[str, Any], ...] = ({}, {"packing": False, "sharedPrompts": "Disabled"})
        jobs = [sharing(folders["qwen2"], way, deterministic=deterministic) for way in ways]
        ours, padded = (gradients_of(job, serial(job, 1, 1), 1, empty) for job in jobs)
        assert_same_gradients(ours, padded, TOLERANCE)


def test_measured_steps_have_the_shared_prompts_of_a_mean_mini_batch(folders: dict[str, Path]) -> None:
    for mini, same in ((16, 4), (8, 2), (4, 1)):
        algorithm = {"grpo": {"miniBatchSize": mini, "groupSize": 4}}
        job = make_job(
            folders["llama"], algorithm=algorithm, rollout={"batchSize": 16}, training={"microBatchSize": 4}
        )  # fmt: skip
        trainer = trainer_of(job, serial(job, 1, 1, ("actor",)), 0, 1, Alone())
        assert made_up_batch(trainer).prompt_table.numbers == [row // same * same for row in range(mini)]
