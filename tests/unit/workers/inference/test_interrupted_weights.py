"""An interrupted update of a critic's weights: it scores nothing until a complete version is loaded."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.workers.outbox import RecordedOutbox

from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import pack, unpack
from rlhf_common.samples import FloatArray, ScoringSample
from rlhf_workers.failures import WorkError
from rlhf_workers.inference.inference_role import InferenceRole
from rlhf_workers.inference.model_scorer import ValueScorer
from rlhf_workers.weights.fetching import FetchedWeights
from rlhf_workers.worker_role import NO_VERSION


class ConstantCritic(ValueScorer):
    """A critic whose every value is the first of its two weights."""

    def __init__(self) -> None:
        self.model = torch.nn.ParameterList([torch.zeros(1), torch.zeros(1)]).requires_grad_(False)
        self.chunks = None

    def score(self, samples: Sequence[ScoringSample]) -> list[FloatArray]:
        return [np.full(len(sample.response), float(self.model[0]), np.float32) for sample in samples]


class TornLoan(FetchedWeights):
    """Weights of a peer that ended while they were copied."""

    def confirm(self) -> None:
        raise WorkError("WeightsTorn", "the peer ended the loan while weights were copied", retryable=True)


class BrokenDevice(torch.Tensor):
    """A tensor that cannot be copied."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def] # torch's protocol
        if func is torch.Tensor.copy_:
            raise RuntimeError("the copy failed")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call] # torch


@dataclass
class TornSource:
    """Yields the weights of any version, which fail as `fault` says."""

    fault: str = ""
    versions: list[int] = field(default_factory=list)

    @contextmanager
    def __call__(
        self, model: str, version: int, sources: Sequence[pb.WeightLocation], certificates: Path | None
    ) -> Iterator[FetchedWeights]:
        self.versions.append(version)
        tensors = {"0": torch.full((1,), float(version)), "1": torch.full((1,), float(version))}
        if self.fault == "shape":
            tensors["1"] = torch.zeros(3)
        if self.fault == "copy":
            tensors["1"] = torch.zeros(1).as_subclass(BrokenDevice)
        yield (TornLoan if self.fault == "loan" else FetchedWeights)(tensors, {"stream": 8})


def load(role: InferenceRole, version: int) -> None:
    role.load(pb.LoadWeights(model="critic", version=version), None)


def score(role: InferenceRole, outbox: RecordedOutbox, number: int, task: str = "values") -> None:
    tokens = pack(np.array([5, 6], np.int32))
    key = pb.SampleKey(iteration=1, sample=number, attempt=1)
    sample = pb.ScoreSample(key=key, tasks=[task], prompt=tokens, response=tokens)
    role.handle(pb.Command(id=number, score=pb.Score(samples=[sample])), outbox)


def values(outbox: RecordedOutbox) -> dict[int, list[float]]:
    return {message.key.sample: unpack(message.result).tolist() for message in outbox.reports("scored")}


@pytest.fixture
def source() -> TornSource:
    return TornSource()


@pytest.fixture
def role(source: TornSource) -> InferenceRole:
    role = InferenceRole(batch_tokens=64, certificates=None, weight_fetcher=source)
    role.add("values", "critic", ConstantCritic())
    return role


@pytest.mark.parametrize("fault", ["loan", "copy"])
def test_a_critic_with_torn_weights_scores_nothing_until_it_is_loaded(
    role: InferenceRole, source: TornSource, fault: str
) -> None:
    outbox = RecordedOutbox()
    load(role, 3)
    score(role, outbox, 1)  # waits while the next version comes
    source.fault = fault
    with pytest.raises((WorkError, RuntimeError)):
        load(role, 4)
    assert role.versions() == {"critic": NO_VERSION}
    assert not role.step(outbox)
    with pytest.raises(WorkError, match="critic was interrupted; it must be loaded again") as refused:
        score(role, outbox, 2)
    assert refused.value.failure.retryable
    assert not outbox.reports("scored")
    source.fault = ""
    load(role, 4)
    score(role, outbox, 2)
    while role.active():
        role.step(outbox)
    assert role.versions() == {"critic": 4}
    assert values(outbox) == {1: [4.0, 4.0], 2: [4.0, 4.0]}


def test_the_folder_is_loaded_again_after_an_interrupted_update(role: InferenceRole, source: TornSource) -> None:
    source.fault = "loan"
    with pytest.raises(WorkError):
        load(role, 1)
    source.fault = ""
    load(role, 0)
    assert (role.versions(), source.versions) == ({"critic": 0}, [1, 0])


def test_weights_that_do_not_fit_leave_the_earlier_version(role: InferenceRole, source: TornSource) -> None:
    outbox = RecordedOutbox()
    load(role, 3)
    source.fault = "shape"
    with pytest.raises(WorkError, match="the model needs"):
        load(role, 4)
    score(role, outbox, 1)
    role.step(outbox)
    assert role.versions() == {"critic": 3}
    assert values(outbox) == {1: [3.0, 3.0]}


def test_other_models_of_the_worker_still_score(role: InferenceRole, source: TornSource) -> None:
    outbox = RecordedOutbox()
    role.add("reference", "reference", ConstantCritic())
    source.fault = "loan"
    with pytest.raises(WorkError):
        load(role, 4)
    score(role, outbox, 1, task="reference")
    role.step(outbox)
    assert list(values(outbox)) == [1]
