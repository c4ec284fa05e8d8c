"""Packed rows: gradients equal those of padded rows and of the whole model, sample by sample, without padding.

The oracle is transformers' own model on one unpadded sample at a time (`plain_gradients`). Tolerance: 1e-5 relative to
the largest gradient entry of the parameter.
"""

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

from rlhf_api.algorithms.graph import SAMPLED_FIELD
from rlhf_api.algorithms.mismatch import LIMITS
from rlhf_api.job import RLHFJob
from rlhf_planner.schedule.methods import opposite
from rlhf_workers.algorithms.clipped_policy import ClippedPolicyGradient
from rlhf_workers.algorithms.registry import build_algorithm
from rlhf_workers.training.batches.packed_batches import packed_split
from rlhf_workers.training.batches.training_batch import OLD_FIELD, micro_batch

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "mixtral", "qwen3_moe")
TOLERANCE = 1e-5


def packed(folder: Path, training: dict[str, Any] | None = None, **spec: Any) -> RLHFJob:
    return make_job(folder, folder, training={"microBatchSize": 4, "packing": True, **(training or {})}, **spec)


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_row_gives_the_gradients_of_the_whole_model(
    family: str, stages: int, deterministic: bool, folders: dict[str, Path]
) -> None:
    """With eager attention and the fused kernel; some lengths exceed the families' windows."""
    job, batch = packed(folders[family], deterministic=deterministic), make_batch(abstained=(3,))
    assert max(batch.lengths) > models.WINDOW
    ours = gradients_of(job, serial(job, stages, 1), stages, batch)
    assert_same_gradients(ours, plain_gradients(job, batch), TOLERANCE)


@pytest.mark.full(quick=1)
@pytest.mark.parametrize(
    "training",
    [{}, {"microBatchTokens": 20}, {"microBatchSize": 8}, {"microBatchSize": 1}, {"activationCheckpointing": True}],
)
def test_packing_gives_the_gradients_of_padding(training: dict[str, Any], folders: dict[str, Path]) -> None:
    batch, folder = make_batch(), folders["mistral"]
    padded = make_job(folder, folder, training={"microBatchSize": 4})
    expected = gradients_of(padded, serial(padded, 1, 1), 1, batch)
    job = packed(folder, training)
    for pipeline, data in ((1, 1), (2, 1), (1, 2), (2, 2)):
        if data * job.spec.training.micro_batch_size <= 8:
            ours = gradients_of(job, serial(job, pipeline, data), pipeline * data, batch)
            assert_same_gradients(ours, expected, TOLERANCE)


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("family", FAMILIES)
def test_tables_with_transfers_in_turn_and_split_backward_give_the_same(family: str, folders: dict[str, Path]) -> None:
    job, batch = packed(folders[family]), make_batch()
    table = serial(job, 2, 1)
    expected = gradients_of(job, table, 2, batch)
    fused = interleave(opposite(("actor", "critic"), 2, 2))
    for other in (fused, split_backward(fused), split_backward(table)):
        assert_same_gradients(gradients_of(job, other, 2, batch), expected, 2e-6)


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("algorithm", OF_WHOLE_RESPONSES)
def test_objectives_of_whole_responses_and_of_pairs_have_the_gradients_of_padding(
    algorithm: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    pair: tuple[dict[str, Any], ...] = ({"packing": True}, {})
    found = [algorithm_gradients(algorithm, folders["qwen3"], tmp_path, 2, **training) for training in pair]
    assert any(gradient.any() for gradient in found[0].values())
    assert_same_gradients(found[0], found[1], TOLERANCE)


@pytest.mark.full
def test_adapters_and_a_draft_model_have_the_same_gradients(folders: dict[str, Path], tmp_path: Path) -> None:
    draft = models.write_policy(tmp_path / "draft", "llama", seed=9, num_hidden_layers=1, hidden_size=16)
    speculation = {"drafters": ["Model"], "draftModel": {"path": str(draft), "train": "Enabled"}}
    found = list[dict[str, torch.Tensor]]()
    for packing in (True, False):
        training = {"packing": packing, "lora": {"rank": 4}}
        job = packed(folders["qwen2"], training, generation={"speculation": speculation})
        trainer = trainer_of(job, serial(job, 1, 1), 0, 1, Alone())
        assert trainer.draft is not None
        assert trainer.draft.optimizer is not None
        optimizers = {f"{key}": optimizer for key, optimizer in trainer.optimizers.items()}
        optimizers["draft"] = trainer.draft.optimizer
        for optimizer in optimizers.values():
            optimizer.step = lambda *_: None  # type: ignore[method-assign]
        next(trainer.train(0, make_batch()))
        found.append({name: optimizer.gradients.clone() for name, optimizer in optimizers.items()})
    assert all(gradient.any() for gradient in found[0].values())
    assert_same_gradients(found[0], found[1], TOLERANCE)


def test_no_sample_of_a_row_sees_another(folders: dict[str, Path]) -> None:
    """Another first sample changes no bit of the states of later ones."""
    job, batch = packed(folders["mistral"]), make_batch()
    trainer = trainer_of(job, serial(job, 1, 1), 0, 1, Alone())
    stage = trainer.stages["actor", 0]
    row = micro_batch(batch, [0, 1, 2], {}, packed=True)
    assert row.packed is not None
    assert row.tokens.shape == (1, sum(segment.tokens for segment in row.packed))
    other = row.tokens.clone()
    other[:, : row.packed[0].tokens] += 1
    original, changed = (stage(stage.embed(tokens), row.packed) for tokens in (row.tokens, other))
    behind = slice(row.packed[0].tokens, None)
    assert torch.equal(original[:, behind], changed[:, behind])
    assert not torch.equal(original[:, : row.packed[0].tokens], changed[:, : row.packed[0].tokens])


def test_nothing_is_padding(folders: dict[str, Path]) -> None:
    batch = make_batch()
    found = {}
    for packing in (True, False):
        job = packed(folders["llama"], {"packing": packing})
        trainer = trainer_of(job, serial(job, 1, 1), 0, 1, Alone())
        found[packing] = exhaust(trainer.train(0, batch))
    assert found[True]["train/padding"] == 0.0 < found[False]["train/padding"]
    assert found[True]["train/largest_micro_batch_tokens"] < found[False]["train/largest_micro_batch_tokens"]
    for model in ("actor", "critic"):
        packed_norm, padded_norm = (found[packing][f"gradient_norm/{model}"] for packing in (True, False))
        assert packed_norm == pytest.approx(padded_norm, rel=TOLERANCE)


def test_the_first_pass_is_packed_as_well(folders: dict[str, Path]) -> None:
    batch, found = make_batch(), {}
    for packing in (True, False):
        fields = {"ppo": {"miniBatchSize": 8, "oldLogProbabilities": "Trainer"}}
        job = packed(folders["gemma2"], {"packing": packing}, algorithm=fields)
        trainer = trainer_of(job, serial(job, 1, 1), 0, 1, Alone())
        assert trainer._old_logprobs is not None
        found[packing] = exhaust(trainer._old_logprobs.added_to(0, batch, trainer.layout)).fields[OLD_FIELD]
    assert torch.allclose(found[True], found[False], rtol=1e-5, atol=1e-6)
    assert found[True].any()


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("mode", LIMITS)
def test_a_packed_row_corrects_each_response_as_a_padded_one(mode: str, folders: dict[str, Path]) -> None:
    """Modes of whole responses need the number of responses, which is not the number of rows."""
    ppo = {"miniBatchSize": 8, "oldLogProbabilities": "Trainer", "mismatchCorrection": {"mode": mode}}
    algorithm = build_algorithm(packed(folders["llama"], algorithm={"ppo": ppo}).spec, torch.device("cpu"))
    assert isinstance(algorithm, ClippedPolicyGradient)
    batch = make_batch(abstained=(3,))
    offsets = (torch.arange(len(batch.mask)) - 4)[:, None] * 0.1
    batch = batch.with_fields(**{OLD_FIELD: batch.fields[SAMPLED_FIELD] + offsets * batch.mask})
    found = []
    for is_packed in (True, False):
        row = micro_batch(batch, range(8), {}, packed=is_packed)
        found.append(algorithm.corrected(torch.ones(len(row.targets)), row))
    assert torch.equal(found[0], found[1])
    assert len(found[0].unique()) > 1


class TestSplit:
    LENGTHS = (470, 12, 30, 60, 200, 9, 15, 80, 33, 21, 44, 7)

    @pytest.mark.parametrize("bound", [None, 1000, 300])
    @pytest.mark.parametrize("together", [1, 2])
    @pytest.mark.parametrize("replicas", [1, 3])
    def test_every_sample_is_in_one_micro_batch_within_the_bounds(
        self, replicas: int, together: int, bound: int | None
    ) -> None:
        samples = list(range(len(self.LENGTHS)))
        rows = packed_split(samples, self.LENGTHS, replicas, 2, together, bound)
        cells = [cell for row in rows for cell in row]
        assert sorted(sample for cell in cells for sample in cell) == samples
        assert len({len(row) for row in rows}) == 1
        assert {0 < len(cell) <= len(samples) // (2 * replicas) for cell in cells} == {True}
        units = [cell[start : start + together] for cell in cells for start in range(0, len(cell), together)]
        assert all(unit == list(range(unit[0], unit[0] + together)) for unit in units)
        if bound is not None:
            longest = max(sum(self.LENGTHS[sample] for sample in unit) for unit in units)
            assert max(sum(self.LENGTHS[sample] for sample in cell) for cell in cells) <= max(bound, longest)

    def test_micro_batches_are_near_equal_and_few(self) -> None:
        rows = packed_split(range(64), [10 + 7 * (sample % 9) for sample in range(64)], 1, 8, 1, None)
        loads = [sum(10 + 7 * (sample % 9) for sample in cell) for cell in rows[0]]
        assert len(loads) == 8
        assert max(loads) < 1.1 * sum(loads) / 8

    def test_what_does_not_divide_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="must be a multiple of 3"):
            packed_split(range(8), [1] * 8, 1, 3, 1, None)
        with pytest.raises(ValueError, match="do not hold whole groups of 3"):
            packed_split(range(8), [1] * 8, 1, 2, 3, None)
