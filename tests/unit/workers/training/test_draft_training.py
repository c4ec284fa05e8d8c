"""A draft model on the training ranks: the policy is bitwise unchanged, and the draft model approaches it.

The draft model is the same after a restore, over more ranks, and where the policy's step is skipped.
"""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.model_folders import models
from tests.support.training.training_ranks import (
    CPU,
    TWO_EPOCHS,
    Alone,
    ThreadCommunicator,
    assert_bitwise,
    exhaust,
    finish_folder,
    make_batch,
    make_job,
    on_ranks,
    run,
    serial,
    trainer_of,
)

from rlhf_api.job import RLHFJob
from rlhf_workers.failures import WorkError
from rlhf_workers.training.checkpoints.draft_files import draft_problem
from rlhf_workers.training.stages.model_stages import ModelStage
from rlhf_workers.training.trainer import Trainer

TIMES = ("draft/seconds", "draft/step_seconds_max")


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "draft"
    return models.write_policy(folder, "llama", seed=9, num_hidden_layers=1, hidden_size=16, intermediate_size=32)


def draft_job(policy: Path, draft: Path, *, train: str = "Enabled", rate: float = 1e-2, **spec: Any) -> RLHFJob:
    model = {"path": str(draft), "train": train, "learningRate": rate}
    generation = {"speculation": {"drafters": ["Model"], "draftModel": model}}
    return make_job(policy, policy, generation=generation, **spec)


def draft_of(trainers: list[Trainer]) -> dict[str, torch.Tensor]:
    """Return its weights, after checking that all its ranks have the same."""
    found: dict[str, torch.Tensor] = {}
    for trainer in trainers:
        if trainer.draft is not None and trainer.draft.optimizer is not None:
            for name, value in trainer.draft.optimizer.parameters.items():
                assert torch.equal(found.setdefault(name, value.detach()), value), f"copies of {name} differ"
    assert found
    return found


def assert_same_draft(ours: list[Trainer], theirs: list[Trainer]) -> None:
    left, right = draft_of(ours), draft_of(theirs)
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def timeless(metrics: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in each.items() if name not in TIMES} for each in metrics]


@pytest.mark.full(quick=1)
@pytest.mark.parametrize(("pipeline", "data"), [(1, 1), (2, 2)])
def test_policy_and_critic_have_the_bits_that_they_have_without_it(
    folder: Path, draft: Path, pipeline: int, data: int
) -> None:
    ours, with_it, _ = run(draft_job(folder, draft, algorithm=TWO_EPOCHS), range(2), pipeline, data)
    theirs, without, _ = run(draft_job(folder, draft, train="Disabled", algorithm=TWO_EPOCHS), range(2), pipeline, data)
    assert_bitwise(ours, theirs)
    of_draft = {name for name in with_it[0] if name.startswith("draft/")}
    assert [{name: each[name] for name in each if name not in of_draft} for each in with_it] == without
    assert of_draft > {"draft/loss", "draft/divergence", "draft/agreement", "draft/published_bytes"}
    assert {trainer.draft is None for trainer in theirs} == {True}


def test_on_a_fixed_batch_its_loss_falls_and_it_comes_to_choose_the_policys_tokens(folder: Path, draft: Path) -> None:
    still = {"optimizer": {"learningRate": 1e-11, "criticLearningRate": 1e-11}}  # a policy that stands still
    job = draft_job(folder, draft, rate=3e-2, training=still)
    trainer = trainer_of(job, serial(job, 1, 1), 0, 1, Alone())
    seen = [exhaust(trainer.train(iteration, make_batch(seed=3))) for iteration in range(12)]
    first, last = seen[0], seen[-1]
    assert last["draft/loss"] < first["draft/loss"] - 0.4
    assert last["draft/divergence"] < 0.5 * first["draft/divergence"]
    assert last["draft/agreement"] > first["draft/agreement"] + 0.3
    entropies = [each["draft/loss"] - each["draft/divergence"] for each in seen]
    assert entropies == pytest.approx([entropies[0]] * len(seen), rel=1e-3), "the policy moved"


@pytest.mark.full
def test_two_data_ranks_teach_it_what_one_does(folder: Path, draft: Path) -> None:
    one_rank, one_said, _ = run(draft_job(folder, draft), range(1), pipeline=1)
    two_ranks, two_said, _ = run(draft_job(folder, draft), range(1), pipeline=1, data=2)
    assert two_said[0]["draft/loss"] == pytest.approx(one_said[0]["draft/loss"], rel=1e-5)
    ours, theirs = gradients(draft_job(folder, draft), 1), gradients(draft_job(folder, draft), 2)
    torch.testing.assert_close(theirs, ours, atol=1e-6, rtol=1e-4)
    assert draft_of(one_rank).keys() == draft_of(two_ranks).keys()


def gradients(job: RLHFJob, data: int) -> torch.Tensor:
    """Return gradients of the first mini-batch, over all ranks."""

    def work(rank: int, peers: ThreadCommunicator) -> torch.Tensor:
        trainer = trainer_of(job, serial(job, 1, data), rank, data, peers)
        assert trainer.draft is not None
        assert trainer.draft.optimizer is not None
        optimizer = trainer.draft.optimizer
        captured: list[torch.Tensor] = []
        optimizer.step = lambda *_: captured.append(optimizer.gradients.clone())  # type: ignore[method-assign]
        next(trainer.train(0, make_batch()))
        return captured[0]

    results = on_ranks(data, work)
    assert all(torch.equal(result, results[0]) for result in results)
    first: torch.Tensor = results[0]
    return first


@pytest.mark.full
def test_resuming_from_a_checkpoint_is_bitwise_exact_and_the_folder_is_a_model(
    folder: Path, draft: Path, tmp_path: Path
) -> None:
    job = draft_job(folder, draft, algorithm=TWO_EPOCHS)
    straight, said, _ = run(job, range(3), 2, 2)
    half, _, files = run(job, range(2), 2, 2, save=tmp_path)
    finish_folder(tmp_path, folder)
    finish_draft(tmp_path, draft)
    resumed, after, _ = run(job, range(2, 3), 2, 2, restore=str(tmp_path))
    assert timeless(after) == timeless(said[2:])
    assert_bitwise(straight, resumed)
    assert_same_draft(straight, resumed)
    written = [file for file in files if "draft" in file.path]
    assert [(file.path, file.model) for file in written] == [
        ("draft/model-stage-00000.safetensors", "draft"),
        ("optimizer/draft-stage-00000.safetensors", ""),
    ]
    saved = load_file(tmp_path / "draft" / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in draft_of(half).items())


def finish_draft(checkpoint: Path, source: Path) -> None:
    """Finish the draft model's file like the coordinator."""
    (checkpoint / "draft" / "config.json").write_bytes((source / "config.json").read_bytes())
    (checkpoint / "draft" / "model-stage-00000.safetensors").rename(checkpoint / "draft" / "model.safetensors")


def test_a_checkpoint_from_before_begins_it_from_its_folder(folder: Path, draft: Path, tmp_path: Path) -> None:
    run(draft_job(folder, draft, train="Disabled"), range(1), save=tmp_path)
    finish_folder(tmp_path, folder)
    resumed, _, _ = run(draft_job(folder, draft), range(1, 1), restore=str(tmp_path))
    start = load_file(draft / "model.safetensors")
    assert all(torch.equal(start[name], value) for name, value in draft_of(resumed).items())


def test_its_step_alone_is_skipped_when_its_gradient_is_not_finite(
    folder: Path, draft: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = draft_job(folder, draft)
    trainer = trainer_of(job, serial(job, 1, 1), 0, 1, Alone())
    assert trainer.draft is not None
    assert isinstance(trainer.draft.stage, ModelStage)
    with torch.no_grad():
        trainer.draft.stage.model.norm.weight[0] = torch.inf
    before = {name: value.clone() for name, value in draft_of([trainer]).items()}
    with caplog.at_level(logging.WARNING):
        metrics = exhaust(trainer.train(0, make_batch()))
    assert metrics["draft/skipped_steps"] == 1
    assert "draft/loss" not in metrics, "what was not learned of is in no mean"
    assert "draft model" in caplog.text
    assert trainer.progress.steps == 1
    assert all(torch.equal(before[name], value) for name, value in draft_of([trainer]).items())


def test_a_mini_batch_that_the_policy_skips_teaches_it_nothing(folder: Path, draft: Path) -> None:
    job = draft_job(folder, draft)
    trainer = trainer_of(job, serial(job, 1, 1), 0, 1, Alone())
    with torch.no_grad():
        trainer.stages["critic", 0].value_head.weight[0, 0] = torch.nan
    before = {name: value.clone() for name, value in draft_of([trainer]).items()}
    metrics = exhaust(trainer.train(0, make_batch()))
    assert metrics["train/nonfinite_steps"] == 1
    assert "draft/loss" not in metrics
    assert all(torch.equal(before[name], value) for name, value in draft_of([trainer]).items())
    assert trainer.draft is not None
    assert trainer.draft.steps == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": models.VOCABULARY + 512}, f"over 562 tokens and the policy's over {models.VOCABULARY}"),
        ({"num_hidden_layers": 2, "hidden_size": 32}, "half of the policy's at most"),
    ],
)
def test_a_model_that_cannot_draft_for_the_policy_is_refused_in_words(
    folder: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    other = models.write_policy(tmp_path / "other", "llama", **{"num_hidden_layers": 1, "hidden_size": 16, **changes})
    job = draft_job(folder, other)
    with pytest.raises(WorkError, match=words) as raised:
        trainer_of(job, serial(job, 1, 1), 0, 1, Alone())
    assert raised.value.failure.field == "spec.generation.speculation.draftModel.path"
    assert raised.value.failure.exit_code


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("padding", [-3, 6])
def test_logits_of_one_vocabulary_may_be_padded_differently(folder: Path, tmp_path: Path, padding: int) -> None:
    width = models.VOCABULARY + padding
    other = models.write_policy(tmp_path / "other", "llama", vocab_size=width, num_hidden_layers=1, hidden_size=16)
    job = draft_job(folder, other)
    trainer = trainer_of(job, serial(job, 1, 1), 0, 1, Alone())
    metrics = [exhaust(trainer.train(each, make_batch(vocabulary=models.VOCABULARY))) for each in range(2)]
    assert metrics[1]["draft/loss"] < metrics[0]["draft/loss"]
    assert metrics[1]["draft/skipped_steps"] == 0


def test_a_model_half_as_large_is_taken() -> None:
    policy = models.build_config("llama", num_hidden_layers=8)
    assert draft_problem(models.build_config("llama", num_hidden_layers=1), policy) == ""


def test_it_leaves_the_device_with_the_rest_and_comes_back(folder: Path, draft: Path) -> None:
    job = draft_job(folder, draft)
    trainer = trainer_of(job, serial(job, 1, 1), 0, 1, Alone())
    assert trainer.device == CPU
    exhaust(trainer.train(0, make_batch()))
    trainer.offload()
    trainer.onload()
    there, _, _ = run(job, range(2), pipeline=1)
    exhaust(trainer.train(1, make_batch(seed=1)))
    assert_same_draft([trainer], there)
