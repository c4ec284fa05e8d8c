"""KL has one unit: the job's KL per response is the value that the trainer compares with klTarget, to the last
digit."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.training.training_ranks import PPO_FIELDS, make_samples

from rlhf_api.algorithms import full_graph
from rlhf_common.arrays import unpack
from rlhf_coordinator.job.iteration_metrics import batch_metrics, finite_metrics
from rlhf_workers.algorithms.batch_metrics import batch_metrics as trained_metrics
from rlhf_workers.training.batches.training_batch import batch_from

GRAPH = full_graph("ppo")


def ledger_of(samples: Any) -> Any:
    def stored(sample: Any) -> Any:
        fields = {name: unpack(value).tobytes() for name, value in sample.fields.items()}
        response = np.asarray(unpack(sample.response))
        return SimpleNamespace(
            fields=fields,
            response=Response(response, fields["log_probabilities"]),
            abstained=sample.abstained,
            reward_metrics={},
            failed=False,
            finish_reason="stop",
        )

    kept = [stored(sample) for sample in samples]
    tokens = sum(len(sample.response) for sample in kept)
    return SimpleNamespace(samples=kept, uncut_samples=kept, trainable=kept, tokens=tokens)


class Response:
    """Tokens with the log-probabilities with which they were sampled."""

    def __init__(self, tokens: np.ndarray, log_probabilities: bytes) -> None:
        self.tokens, self.log_probabilities = tokens, log_probabilities

    def __len__(self) -> int:
        return len(self.tokens)


@pytest.mark.parametrize("abstained", [(), (2, 5)])
def test_kl_is_that_of_the_trainer_both_ways(abstained: tuple[int, ...]) -> None:
    samples = make_samples(abstained=abstained)
    shown = batch_metrics(ledger_of(samples), GRAPH)
    trained = trained_metrics(batch_from(samples, len(samples), PPO_FIELDS), GRAPH)
    assert shown["kl"] == pytest.approx(trained["actor/kl"], rel=1e-9)
    assert shown["kl_per_token"] == pytest.approx(trained["actor/kl_per_token"], rel=1e-9)
    assert shown["kl"] != pytest.approx(shown["kl_per_token"], rel=0.5)


def test_a_batch_without_divergence_shows_none() -> None:
    samples = make_samples(abstained=range(8))
    assert not {"kl", "kl_per_token"} & batch_metrics(ledger_of(samples), GRAPH).keys()


@given(st.dictionaries(st.text(min_size=1).filter(lambda name: not name.startswith("nonfinite/")), st.floats()))
def test_a_metric_that_is_not_finite_is_named_instead_of_dropped(metrics: dict[str, float]) -> None:
    shown = finite_metrics(metrics)
    assert all(math.isfinite(value) for value in shown.values())
    for name, value in metrics.items():
        assert (name in shown) == math.isfinite(value)
        assert shown.get(f"nonfinite/{name}") == (None if math.isfinite(value) else 1.0)
