"""Log-probabilities of the sampled tokens by the training ranks equal the whole model's, in every layout.

The oracle is transformers' own model on one unpadded sample at a time.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.support.training.fused_ranks import fused_job, fused_table, train
from tests.support.training.training_ranks import (
    CPU,
    PPO_FIELDS,
    Alone,
    ThreadCommunicator,
    assert_bitwise,
    exhaust,
    finish_folder,
    make_batch,
    make_job,
    make_samples,
    on_ranks,
    run,
    serial,
    trainer_of,
    weights_of,
)
from tests.support.workers.engine_driving import finish, requests

from rlhf_api.algorithms.mismatch import MismatchCorrection
from rlhf_api.job import RLHFJob
from rlhf_common.arrays import pack
from rlhf_common.schedule import ScheduleTable
from rlhf_planner.schedule.methods import FUSED_SPLIT
from rlhf_workers.algorithms.objectives import PolicyTerms
from rlhf_workers.algorithms.registry import build_algorithm
from rlhf_workers.generation.torch_engine.build import build_engine
from rlhf_workers.losses import mismatch
from rlhf_workers.models.loading import load_tokenizer
from rlhf_workers.training.batches.training_batch import OLD_FIELD, STALE_FIELD, TrainingBatch, batch_from, micro_batch

TEMPERATURE = 0.8


def recomputing(job: RLHFJob, **fields: Any) -> RLHFJob:
    """Return the job with the trainer's log-probabilities, and other fields of its PPO."""
    update = {"old_log_probabilities": "Trainer", **fields}
    ppo = job.spec.algorithm.fields.model_copy(update=update)
    return job.model_copy(
        update={"spec": job.spec.model_copy(update={"algorithm": job.spec.algorithm.model_copy(update={"ppo": ppo})})}
    )


def by_transformers(folder: str, batch: TrainingBatch) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    result = torch.zeros(batch.mask.shape)
    for row, prompt in enumerate(batch.prompts):
        response = batch.responses[row, : batch.response_lengths[row]]
        with torch.no_grad():
            logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        result[row, : len(response)] = torch.log_softmax(logits, -1)[torch.arange(len(response)), response]
    return result * batch.mask


def computed(job: RLHFJob, table: ScheduleTable, world: int, batch: TrainingBatch) -> torch.Tensor:
    """Return the values of the ranks, after checking that they are bitwise equal and that no weight changed."""

    def work(rank: int, peers: ThreadCommunicator) -> torch.Tensor:
        trainer = trainer_of(job, table, rank, world, peers)
        before = {name: value.clone() for name, value in weights_of([trainer]).items()}
        assert trainer._old_logprobs is not None
        result: torch.Tensor = exhaust(trainer._old_logprobs.added_to(3, batch, trainer.layout)).fields[OLD_FIELD]
        assert all(torch.equal(value, before[name]) for name, value in weights_of([trainer]).items())
        assert not any(bool(optimizer.gradients.any()) for optimizer in trainer.optimizers.values())
        return result

    found: list[torch.Tensor] = on_ranks(world, work)
    assert all(torch.equal(found[0], other) for other in found)
    return found[0]


@pytest.mark.full(quick=2)
@pytest.mark.parametrize(("pipeline", "data"), [(1, 1), (2, 2), (4, 1)])
def test_pipelines_and_replicas_compute_what_the_whole_model_does(tmp_path: Path, pipeline: int, data: int) -> None:
    job = recomputing(fused_job(tmp_path))
    batch = make_batch(abstained=(2,))
    found = computed(job, serial(job, pipeline, data), pipeline * data, batch)
    torch.testing.assert_close(found, by_transformers(job.spec.models.actor.path, batch), rtol=1e-5, atol=1e-5)


@pytest.mark.full(quick=1)
@pytest.mark.parametrize(("pipeline", "data"), [(1, 1), (2, 2)])
def test_micro_batches_of_bounded_tokens_compute_what_the_whole_model_does(
    tmp_path: Path, pipeline: int, data: int
) -> None:
    whole, batch = recomputing(fused_job(tmp_path)), make_batch(abstained=(2,))
    training = whole.spec.training.model_copy(update={"micro_batch_tokens": max(batch.lengths)})
    job = whole.model_copy(update={"spec": whole.spec.model_copy(update={"training": training})})
    found = computed(job, serial(job, pipeline, data), pipeline * data, batch)
    torch.testing.assert_close(found, by_transformers(job.spec.models.actor.path, batch), rtol=1e-5, atol=1e-5)


def test_ranks_of_a_fused_schedule_compute_the_same_bits(tmp_path: Path) -> None:
    """The critic's stages are in opposite order on the same ranks."""
    job = recomputing(fused_job(tmp_path))
    batch = make_batch()
    fused = computed(job, fused_table(job, 2, 1, FUSED_SPLIT), 2, batch)
    assert torch.equal(fused, computed(job, serial(job, 2, 1), 2, batch))


def test_training_computes_the_same_bits_again_and_is_the_engine_s_where_that_said_the_same(folder: Path) -> None:
    """The ratio of the first step is 1 exactly; a job whose engine returned these numbers trains the same weights."""
    job = make_job(folder, folder, algorithm={"ppo": {"miniBatchSize": 8, "epochs": 2}})
    trainer = trainer_of(recomputing(job), serial(job, 1, 1), 0, 1, Alone())
    batch = make_batch()
    old = exhaust(trainer._old_logprobs.added_to(0, batch, trainer.layout)).fields[OLD_FIELD]  # type: ignore[union-attr]
    agreed = batch.with_fields(log_probabilities=old)
    metrics = exhaust(trainer.train(0, agreed))
    assert (metrics["actor/mismatch"], metrics["actor/mismatch_max"], metrics["actor/mismatch_kl"]) == (0, 0, 0)
    engine = trainer_of(job, serial(job, 1, 1), 0, 1, Alone())
    assert exhaust(engine.train(0, agreed))["actor/mismatch_max"] == 0
    assert_bitwise([trainer], [engine])


def test_another_engine_is_seen_and_corrected(folder: Path) -> None:
    """The engine's numbers are synthetic and so far off that most tokens are truncated: the weights differ."""
    job = recomputing(make_job(folder, folder))
    limits = {"mode": "Truncate"}
    corrected = make_job(
        folder, folder, algorithm={"ppo": {"miniBatchSize": 8, "oldLogProbabilities": "Trainer",
                                           "mismatchCorrection": limits}}
    )  # fmt: skip
    first, (without,), _ = run(job, range(1), pipeline=1)
    second, (with_it,), _ = run(corrected, range(1), pipeline=1)
    for metrics in (without, with_it):
        assert metrics["actor/mismatch_max"] > metrics["actor/mismatch"] > 0.1
        assert metrics["actor/mismatch_kl"] > 0.001
        assert metrics["actor/approximate_kl"] == 0  # the ratio is against the trainer's, and one step was taken
    assert (without["actor/mismatch_corrected"], without["actor/mismatch_weight"]) == (0, 1)
    assert 0 < with_it["actor/mismatch_corrected"] < 1
    assert with_it["actor/mismatch_weight"] < 2
    assert any(not torch.equal(value, weights_of(second)[name]) for name, value in weights_of(first).items())


def sampled_by(dtype: str, job: RLHFJob) -> tuple[TrainingBatch, RLHFJob]:
    """Return a batch that the torch engine decodes in `dtype`, with synthetic scores, and the job."""
    generation = job.spec.generation.model_copy(update={"engine_args": {"dtype": dtype}})
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"generation": generation})})
    tokenizer = load_tokenizer(job.spec.models.actor.path, "model")
    asked = requests(8, longest=6, response=12)
    done = finish(build_engine(job.spec, tokenizer, CPU), asked)
    samples = make_samples()
    for sample, request in zip(samples, asked, strict=True):
        part = done[request.key.sample]
        values = np.linspace(-1, 1, len(part.tokens), dtype=np.float32)
        sample.prompt.CopyFrom(pack(request.prompt))
        sample.response.CopyFrom(pack(part.tokens))
        for name in ("reference_log_probabilities", "values"):
            sample.fields[name].CopyFrom(pack(values))
        sample.fields["log_probabilities"].CopyFrom(pack(part.log_probabilities))
    return batch_from(samples, len(samples), PPO_FIELDS), job


def test_an_engine_in_bfloat16_is_off_a_trainer_in_float32_and_one_in_float32_is_not(folder: Path) -> None:
    ppo = {"miniBatchSize": 8, "oldLogProbabilities": "Trainer"}
    rollout = {"batchSize": 8, "maxPromptTokens": 8, "maxResponseTokens": 12}
    metrics = {}
    for dtype, high in (("float32", 1.001), ("bfloat16", 1.001), ("bfloat16", 2.0)):
        correction = {"mode": "Truncate", "high": high}
        job = make_job(
            folder,
            folder,
            deterministic=False,
            rollout=rollout,
            algorithm={"ppo": {**ppo, "mismatchCorrection": correction}},
        )
        batch, job = sampled_by(dtype, job)
        trainer = trainer_of(job, serial(job, 1, 1), 0, 1, Alone())
        metrics[dtype, high] = exhaust(trainer.train(0, batch))
    fine, coarse, loose = (
        {name: line[f"actor/{name}"] for name in ("mismatch", "mismatch_max", "mismatch_corrected", "mismatch_weight")}
        for line in metrics.values()
    )
    assert fine["mismatch_max"] < 1e-4
    assert (fine["mismatch_corrected"], loose["mismatch_corrected"]) == (0, 0)
    assert 1e-3 < coarse["mismatch"] < coarse["mismatch_max"] < 0.5
    assert 0 < coarse["mismatch_corrected"] < 1
    assert coarse["mismatch_weight"] < loose["mismatch_weight"]


@pytest.mark.parametrize(
    ("mode", "width"), [("Truncate", 0.5), ("Mask", 0.5), ("GeometricMask", 0.25), ("SequenceMask", 2.0)]
)
def test_the_weight_of_a_token_is_a_number_and_is_for_the_advantage_alone(
    folder: Path, mode: str, width: float
) -> None:
    """Value and slope of every term equal those without a correction; the policy's are multiplied by the weight."""
    fields = {"miniBatchSize": 8, "groupSize": 4, "oldLogProbabilities": "Trainer", "entropyCoefficient": 0.1}
    random = torch.Generator().manual_seed(3)
    batch = make_batch()
    batch = batch.with_fields(
        **{OLD_FIELD: batch.fields["log_probabilities"] + torch.randn(batch.mask.shape, generator=random)}
    )
    found = {}
    for chosen in ("Disabled", mode):
        grpo = {
            "grpo": {**fields, "mismatchCorrection": {"mode": chosen, "low": math.exp(-width), "high": math.exp(width)}}
        }
        algorithm = build_algorithm(make_job(folder, algorithm=grpo).spec, CPU)
        ready = micro_batch(algorithm.prepare(batch), list(range(8)), {})
        log_p = (ready.old + 0.05).requires_grad_()
        terms = algorithm.policy_loss(log_p, log_p.detach(), ready)
        assert isinstance(terms, PolicyTerms)
        (slope,) = torch.autograd.grad(terms.policy.sum(), log_p)
        found[chosen] = (terms, slope, ready)
    (plain, plain_slope, ready), (terms, slope, _) = found.values()
    correction = MismatchCorrection.model_validate({"mode": mode, "low": math.exp(-width), "high": math.exp(width)})
    sampled = ready.fields["log_probabilities"]
    weights, outside = mismatch.correction(ready.old, sampled, ready.samples, 8, correction)
    assert outside.any()
    assert not outside.all()
    torch.testing.assert_close(terms.policy, weights * plain.policy)
    torch.testing.assert_close(slope, weights * plain_slope)
    assert plain.kl is not None and terms.kl is not None and torch.equal(terms.kl, plain.kl)  # noqa: PT018
    assert terms.entropy is not None and plain.entropy is not None and torch.equal(terms.entropy, plain.entropy)  # noqa: PT018


@pytest.mark.full
def test_a_group_that_starts_again_from_its_checkpoint_ends_in_the_same_weights(tmp_path: Path) -> None:
    job = recomputing(fused_job(tmp_path))
    table = fused_table(job, 2, 1, FUSED_SPLIT)
    saved = tmp_path / "checkpoint"
    saved.mkdir()
    train(job, table, 1, range(1), save=saved)
    assert job.spec.models.critic is not None
    finish_folder(saved, Path(job.spec.models.actor.path), Path(job.spec.models.critic.path))
    resumed = train(job, table, 1, range(1, 2), restore=str(saved))
    straight = train(job, serial(job, 2, 1), 1, range(2))
    assert_bitwise([trainer for trainer, _ in resumed], [trainer for trainer, _ in straight])


def test_a_token_that_earlier_weights_drew_is_held_against_these_unless_a_correction_does_so(folder: Path) -> None:
    batch = make_batch()
    stale = torch.zeros(batch.mask.shape)
    stale[0, :2] = stale[3, :1] = 1
    carried = batch.with_fields(**{STALE_FIELD: stale})
    job = recomputing(make_job(folder, folder))

    def old_of(job: RLHFJob, batch: TrainingBatch) -> torch.Tensor:
        return computed(job, serial(job, 1, 1), 1, batch)

    fresh, found, drew = old_of(job, batch), old_of(job, carried), stale > 0
    assert torch.equal(found[~drew], fresh[~drew])
    assert torch.equal(found[drew], batch.fields["log_probabilities"][drew])
    assert not torch.equal(found, fresh)
    corrected = recomputing(job, mismatch_correction=MismatchCorrection(mode="Truncate").resolved())
    assert torch.equal(old_of(corrected, carried), fresh), "the correction makes up for all of the difference"


def test_what_earlier_weights_drew_is_no_mismatch_of_the_engine(folder: Path) -> None:
    job = make_job(folder, folder)
    batch = make_batch()
    trainer = trainer_of(recomputing(job), serial(job, 1, 1), 0, 1, Alone())
    own = exhaust(trainer._old_logprobs.added_to(0, batch, trainer.layout)).fields[OLD_FIELD]  # type: ignore[union-attr]
    stale = torch.zeros(batch.mask.shape)
    stale[:, 0] = 1
    drawn = torch.where(stale > 0, own - 1.0, own)
    for chosen in (job, recomputing(job)):
        for fields, largest in (({}, 1.0), ({STALE_FIELD: stale}, 0.0)):
            engine = trainer_of(chosen, serial(job, 1, 1), 0, 1, Alone())
            metrics = exhaust(engine.train(0, batch.with_fields(log_probabilities=drawn, **fields)))
            assert metrics["actor/mismatch_max"] == pytest.approx(largest, abs=1e-6)
