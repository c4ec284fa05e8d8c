"""A rank that measures its costs trains the same bits, and reports figures that the plan search reads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.model_folders import models
from tests.support.training.training_ranks import (
    ThreadCommunicator,
    assert_bitwise,
    exhaust,
    make_batch,
    make_job,
    on_ranks,
    serial,
    trainer_of,
)
from tests.support.training.training_roles import finish, role_of, train
from tests.support.workers.outbox import RecordedOutbox

from rlhf_api.job import RLHFJob
from rlhf_planner.plan_search.cost_document import CostDocument
from rlhf_planner.plan_search.cost_figures import CPU_FIGURES, FigureSource, ModelPart, PlanCosts
from rlhf_workers.training import cost_profile, hardware_figures
from rlhf_workers.training.cost_profile import profile_costs
from rlhf_workers.training.trainer import Trainer

pytestmark = pytest.mark.full(quick=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_policy(tmp_path_factory.mktemp("models") / "qwen2", "qwen2", seed=1)


@pytest.fixture(autouse=True)
def quick_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure as in a job, with fewer and smaller runs."""
    monkeypatch.setattr(hardware_figures, "REPEATS", 1)
    monkeypatch.setattr(hardware_figures, "PRODUCT_ROWS", {"cpu": 16})
    for module in (hardware_figures, cost_profile):
        monkeypatch.setattr(module, "COPIED_BYTES", {"cpu": 2**12})
    monkeypatch.setattr(cost_profile, "IN_A_ROW", 1)
    monkeypatch.setattr(cost_profile, "PAUSE_SECONDS", 0.0)


def job_in(folder: Path, **training: Any) -> RLHFJob:
    return make_job(folder, folder, training=training)


def profiled(
    job: RLHFJob, pipeline: int, data: int, *, profile: bool = True
) -> list[tuple[Trainer, Any, CostDocument]]:
    """Train two iterations on all ranks, after a profile if asked."""
    table = serial(job, pipeline, data)

    def work(rank: int, peers: ThreadCommunicator) -> tuple[Trainer, Any, CostDocument]:
        trainer = trainer_of(job, table, rank, pipeline * data, peers)
        random = torch.random.get_rng_state()
        document = exhaust(profile_costs(trainer)) if profile else CostDocument()
        assert torch.equal(torch.random.get_rng_state(), random)
        metrics = [exhaust(trainer.train(iteration, make_batch(seed=iteration))) for iteration in range(2)]
        return trainer, metrics, document

    return on_ranks(pipeline * data, work)


def merged(documents: list[CostDocument]) -> PlanCosts:
    first, *others = (CostDocument.read(document.text()) for document in documents)
    for other in others:
        first = first.merged(other)
    return first.applied(CPU_FIGURES)


@pytest.mark.parametrize(("pipeline", "data"), [(2, 1), (1, 2)])
def test_ranks_that_measure_train_the_same_bits(pipeline: int, data: int, folder: Path) -> None:
    job = job_in(folder)
    ranks, others = (profiled(job, pipeline, data, profile=each) for each in (True, False))
    assert [metrics for _, metrics, _ in ranks] == [metrics for _, metrics, _ in others]
    assert_bitwise([trainer for trainer, _, _ in ranks], [trainer for trainer, _, _ in others])
    costs = merged([document for _, _, document in ranks])
    parts = {(profile.role, profile.part) for profile in costs.layers}
    assert parts == {(role, part) for role in ("actor", "critic") for part in ModelPart}
    for profile in costs.layers:
        assert profile.source is FigureSource.MEASURED
        assert 1 <= len(profile.points) <= 4
        assert min(seconds for _, seconds in profile.points) > 0
    figures = (
        costs.flops,
        costs.memory_bandwidth,
        costs.stage_seconds,
        costs.optimizer_seconds,
        costs.inside.bandwidth,
    )
    assert all(figure is not None and figure.source is FigureSource.MEASURED and figure.value > 0 for figure in figures)
    assert costs.start_seconds is not None
    assert costs.between == CPU_FIGURES.between, "all ranks are on one host"


def test_a_measurement_that_fails_is_left_out_and_training_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Trainer) -> float:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(cost_profile, "_step_seconds", fail)
    ranks = profiled(job_in(folder), 1, 2)
    assert "costs of this rank are not measured: RuntimeError: out of memory" in caplog.text
    costs = merged([document for _, _, document in ranks])
    assert costs.flops.source is costs.inside.source is FigureSource.MEASURED
    assert (costs.layers, costs.optimizer_seconds) == ((), None)
    assert_bitwise(
        [trainer for trainer, _, _ in ranks],
        [trainer for trainer, _, _ in profiled(job_in(folder), 1, 2, profile=False)],
    )


def test_a_role_that_is_asked_reports_its_costs_once_before_it_trains(folder: Path) -> None:
    def work(rank: int, peers: ThreadCommunicator) -> RecordedOutbox:
        role, outbox = role_of(folder, peers, rank, profile=True), RecordedOutbox()
        for iteration in range(2):
            outbox.answers.clear()
            role.handle(train(iteration, iteration + 1), outbox)
            finish(role, outbox)
            assert ("train/profile_seconds" in outbox.answers[0].train.metrics) is (iteration == 0)
        return outbox

    for rank, outbox in enumerate(on_ranks(2, work)):
        (report,) = outbox.reports("training_costs")
        assert (report.training_costs.rank, report.training_costs.world_size) == (rank, 2)
        roles = {layer.role for layer in CostDocument.read(report.training_costs.document).layers}
        assert roles == {"actor", "critic"}
        assert outbox.spans.count("train/profile") == 1
