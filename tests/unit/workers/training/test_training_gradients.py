"""Stages, pipelines and replicas: the gradient is that of the whole model on the whole mini-batch.

The oracle is independent of the code under test: transformers' own model on one unpadded sample at a time, and the
losses written out from the formulas. Tolerance: 2e-5 relative to the largest gradient entry of the parameter (float32
sums in another order); between pipeline and data splits of our own, 2e-6.
"""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import transformers
from tests.support.model_folders import models
from tests.support.training.gradient_comparison import assert_same_gradients, plain_gradients
from tests.support.training.training_ranks import gradients_of, interleave, make_batch, make_job, serial, split_backward

from rlhf_common.schedule import Pipeline
from rlhf_workers.training.batches.token_budget import split_minibatch
from rlhf_workers.training.parallel.rank_layout import RankLayout

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "mixtral", "qwen3_moe")


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pipeline_of_two_gives_the_gradients_of_the_whole_model(family: str, folders: dict[str, Path]) -> None:
    job = make_job(folders[family], folders[family])
    batch = make_batch(abstained=(3,))
    assert max(batch.lengths) > models.WINDOW
    assert_same_gradients(gradients_of(job, serial(job, 2, 1), 2, batch), plain_gradients(job, batch), 2e-5)


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_pipelines_1_2_4_and_data_1_2_give_the_same_gradients(family: str, folders: dict[str, Path]) -> None:
    job, batch = make_job(folders[family], folders[family]), make_batch()
    alone = gradients_of(job, serial(job, 1, 1), 1, batch)
    for pipeline, data in ((2, 1), (4, 1), (1, 2), (2, 2)):
        split = gradients_of(job, serial(job, pipeline, data), pipeline * data, batch)
        assert_same_gradients(split, alone, 2e-6)


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("algorithm", ["ppo", "gspo"])
def test_micro_batches_of_bounded_tokens_give_the_gradients_of_those_of_equal_samples(
    algorithm: str, folders: dict[str, Path]
) -> None:
    """Few long samples or many short ones per micro-batch: hidden states of different shapes pass between stages."""
    fields = {"miniBatchSize": 8} if algorithm == "ppo" else {"miniBatchSize": 8, "groupSize": 4}
    critic = folders["llama"] if algorithm == "ppo" else None
    roles = ("actor", "critic") if algorithm == "ppo" else ("actor",)
    batch = make_batch(algorithm)
    without = make_job(folders["llama"], critic, algorithm={algorithm: fields}, training={"microBatchSize": 4})
    equal = gradients_of(without, serial(without, 1, 1, roles), 1, batch)
    bound = {"microBatchSize": 4, "microBatchTokens": max(batch.lengths)}
    job = make_job(folders["llama"], critic, algorithm={algorithm: fields}, training=bound)
    for pipeline, data in ((1, 1), (2, 1), (1, 2), (2, 2)):
        table = serial(job, pipeline, data, roles)
        plan = split_minibatch(
            RankLayout(table, 0, pipeline * data), list(range(8)), batch.lengths, 1, max(batch.lengths)
        )
        assert len(plan.splits["actor"][0]) > table.pipelines[0].microbatches
        assert_same_gradients(gradients_of(job, table, pipeline * data, batch), equal, 2e-6)


def test_a_bound_that_no_micro_batch_meets_changes_no_bit(folders: dict[str, Path]) -> None:
    batch = make_batch()
    jobs = [
        make_job(folders["llama"], folders["llama"], training={"microBatchSize": 4, **more})
        for more in ({}, {"microBatchTokens": 4 * max(batch.lengths)})
    ]
    first, second = (gradients_of(job, serial(job, 2, 1), 2, batch) for job in jobs)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.full(quick=1)
@pytest.mark.parametrize(
    ("aggregation", "estimator"), [("SequenceMean", None), ("TokenMean", "Unbiased"), ("ConstantLength", "K2")]
)
def test_grpo_with_kl_and_entropy_gives_the_gradients_of_its_formula(
    aggregation: str, estimator: str | None, folders: dict[str, Path]
) -> None:
    """DeepSeekMath eq. 3 with k3 (of at most 10 nats) and an entropy bonus; groups of four, one response abstained."""
    fields = {"klCoefficient": 0.3, "entropyCoefficient": 0.05, "clipRange": 0.1, "clipRangeHigh": 0.4}
    grpo = {"miniBatchSize": 8, "groupSize": 4, "lossAggregation": aggregation, "klEstimator": estimator, **fields}
    job, batch = make_job(folders["llama"], algorithm={"grpo": grpo}), make_batch(abstained=(5,))
    model = transformers.AutoModelForCausalLM.from_pretrained(folders["llama"], attn_implementation="eager")
    loss = torch.zeros(())
    for row, prompt in enumerate(batch.prompts):
        if not batch.valid[row]:
            continue
        group = [s for s in range(8) if batch.groups[s] == batch.groups[row] and batch.valid[s]]
        rewards = batch.rewards[group]
        advantage = (batch.rewards[row] - rewards.mean()) / (rewards.std() + 1e-6)
        length = int(batch.response_lengths[row])
        response = batch.responses[row, :length]
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / 0.8
        every = torch.log_softmax(logits, -1)
        log_p = every[torch.arange(length), response]
        ratio = torch.exp(log_p - batch.fields["log_probabilities"][row, :length])
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.4) * advantage)
        difference = batch.fields["reference_log_probabilities"][row, :length] - log_p
        kl = difference**2 / 2 if estimator == "K2" else (difference.exp() - difference - 1).clamp(max=10)
        kl = ratio * kl if estimator == "Unbiased" else kl
        per_token = -surrogate + 0.3 * kl + 0.05 * (every.exp() * every).sum(-1)
        longest = job.spec.rollout.max_response_tokens
        divisor = {"SequenceMean": 7 * length, "TokenMean": batch.tokens, "ConstantLength": 7 * longest}[aggregation]
        loss = loss + per_token.sum() / divisor
    loss.backward()
    expected = {f"actor:{name}": value.grad for name, value in model.named_parameters()}
    ours = gradients_of(job, serial(job, 2, 1, models=("actor",)), 2, batch)
    assert_same_gradients(ours, expected, 5e-5)


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("change", [{"activationCheckpointing": True}, {"microBatchSize": 1}, {"microBatchSize": 8}])
def test_recomputation_and_micro_batch_size_do_not_change_gradients(
    change: dict[str, object], folders: dict[str, Path]
) -> None:
    batch = make_batch()
    plain = make_job(folders["qwen3"], folders["qwen3"])
    changed = make_job(folders["qwen3"], folders["qwen3"], training=change)
    assert_same_gradients(
        gradients_of(changed, serial(changed, 2, 1), 2, batch), gradients_of(plain, serial(plain, 2, 1), 2, batch), 2e-6
    )


def test_the_fused_kernel_gives_the_gradients_of_written_out_attention(folders: dict[str, Path]) -> None:
    batch = make_batch()
    for family in ("llama", "mistral"):
        eager, fused = (make_job(folders[family], folders[family], deterministic=flag) for flag in (True, False))
        table = serial(eager, 2, 1)
        assert_same_gradients(gradients_of(fused, table, 2, batch), gradients_of(eager, table, 2, batch), 2e-5)


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("deterministic", [True, False])
def test_bfloat16_computes_near_the_same_gradients_on_float32_weights(
    deterministic: bool, folders: dict[str, Path]
) -> None:
    batch = make_batch()
    plain, low = (
        make_job(folders["llama"], folders["qwen3"], deterministic=deterministic, training={"precision": precision})
        for precision in ("Float32", "BFloat16")
    )
    table = serial(plain, 2, 1)
    exact, rounded = (gradients_of(job, table, 2, batch) for job in (plain, low))
    for name, expected in exact.items():
        assert rounded[name].dtype == torch.float32
        cosine = torch.nn.functional.cosine_similarity(rounded[name].flatten(), expected.flatten(), dim=0)
        assert cosine > 0.98 or expected.norm() < 1e-4, name


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("recompute", [False, True])
def test_casts_that_micro_batches_share_change_no_bit(
    recompute: bool, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = {"precision": "BFloat16", "activationCheckpointing": recompute}
    job = make_job(folders["llama"], folders["qwen3"], deterministic=False, training=training)
    batch, table = make_batch(), split_backward(serial(job, 2, 1))
    shared = gradients_of(job, table, 2, batch)
    monkeypatch.setattr("rlhf_workers.training.trainer.shared_casts", lambda *_: nullcontext())
    apart = gradients_of(job, table, 2, batch)
    assert [name for name in apart if not torch.equal(apart[name], shared[name])] == []


@pytest.mark.full(quick=1)
@pytest.mark.parametrize(("family", "recompute"), [*((family, False) for family in FAMILIES), ("qwen2", True)])
def test_split_backward_gives_the_gradients_of_whole_backward(
    family: str, recompute: bool, folders: dict[str, Path]
) -> None:
    job = make_job(folders[family], folders[family], training={"activationCheckpointing": recompute})
    batch, table = make_batch(), serial(job, 2, 1)
    whole, split = (gradients_of(job, item, 2, batch) for item in (table, split_backward(table)))
    assert_same_gradients(split, whole, 1e-6)


@pytest.mark.full
def test_opposite_pipelines_interleaved_give_the_gradients_of_serial_ones(folders: dict[str, Path]) -> None:
    """A fused schedule: the actor's forward over the ranks, the critic's in the other direction, with alternating
    steps."""
    job, batch = make_job(folders["gemma2"], folders["llama"]), make_batch()
    both = (
        Pipeline(name="actor", model="actor", stage_ranks=(0, 1), microbatches=4),
        Pipeline(name="critic", model="critic", stage_ranks=(1, 0), microbatches=4),
    )
    fused = interleave(both)
    assert_same_gradients(gradients_of(job, fused, 2, batch), gradients_of(job, serial(job, 2, 1), 2, batch), 2e-6)
    assert_same_gradients(
        gradients_of(job, split_backward(fused), 2, batch), gradients_of(job, serial(job, 2, 1), 2, batch), 2e-6
    )


@pytest.mark.full
def test_two_critic_pipelines_in_one_block_are_two_replicas(folders: dict[str, Path]) -> None:
    """The critic needs half of the ranks: its two pipelines divide the samples; gradients are those of one."""
    job, batch = make_job(folders["llama"], folders["qwen2"]), make_batch()
    table = interleave(
        (
            Pipeline(name="actor", model="actor", stage_ranks=(0, 1, 2, 3), microbatches=4),
            Pipeline(name="critic-0", model="critic", stage_ranks=(1, 0), microbatches=2),
            Pipeline(name="critic-1", model="critic", stage_ranks=(3, 2), microbatches=2),
        )
    )
    assert_same_gradients(gradients_of(job, table, 4, batch), gradients_of(job, serial(job, 1, 1), 1, batch), 2e-6)


def test_two_stages_of_one_pipeline_on_one_rank_need_no_transfer(folders: dict[str, Path]) -> None:
    """A tied embedding's two copies may even share a rank (stages 0 and 3 on rank 0)."""
    job, batch = make_job(folders["qwen2"], folders["qwen2"]), make_batch()
    table = interleave(
        tuple(
            Pipeline(name=model, model=model, stage_ranks=(0, 1, 1, 0), microbatches=4) for model in ("actor", "critic")
        )
    )
    assert_same_gradients(gradients_of(job, table, 2, batch), gradients_of(job, serial(job, 1, 1), 1, batch), 2e-6)
