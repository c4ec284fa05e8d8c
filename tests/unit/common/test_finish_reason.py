"""The finish reason of a response reaches scoring and training, from the engine through the journal."""

from pathlib import Path

import numpy as np
import pytest
from tests.support.coordinator.coordinated import make_job, make_prompts

from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import pack
from rlhf_common.samples import FinishReason, SampleKey
from rlhf_coordinator.storage.batch import batch_parts, replayed
from rlhf_coordinator.storage.journal_pb2 import Record
from rlhf_coordinator.storage.sample_codec import packed, score_sample
from rlhf_workers.failures import WorkError
from rlhf_workers.sample_codec import scoring_sample_of
from rlhf_workers.training.batches.training_batch import batch_from

REASONS: tuple[FinishReason, ...] = ("stop", "length")


def test_it_goes_from_the_journal_into_the_batch_and_to_who_scores(tmp_path: Path) -> None:
    records = [
        Record(
            finished=pb.FinishedSample(
                key=pb.SampleKey(sample=index),
                tokens=packed("int32", bytes(4)),
                log_probabilities=packed("float32", bytes(4)),
                finish_reason=reason,
            )
        )
        for index, reason in enumerate(REASONS)
    ]
    prompts = make_prompts(make_job(tmp_path, batch=2))
    ledger = replayed(0, 2, (), records, prompts)
    (part,) = batch_parts(ledger, prompts)
    assert batch_from(part.samples, 2, ()).finished.tolist() == [True, False]
    for sample in ledger.samples:
        wire = score_sample(SampleKey(0, sample.index, 1), (), bytes(4), "", "{}", sample)
        assert scoring_sample_of(wire).finish_reason == REASONS[sample.index]


def test_a_coordinator_of_the_version_before_says_nothing_and_an_unknown_reason_is_refused() -> None:
    token = pack(np.ones(1, np.int32))
    assert scoring_sample_of(pb.ScoreSample(prompt=token, response=token)).finish_reason == ""
    with pytest.raises(WorkError, match="finish_reason is 'bored', must be one of stop, length"):
        scoring_sample_of(pb.ScoreSample(prompt=token, response=token, finish_reason="bored"))
