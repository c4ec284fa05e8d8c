"""A worker serves the metrics of the catalogue and those of its engine."""

from collections.abc import Iterator

import pytest
import torch
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector, CollectorRegistry
from tests.support.observability.served_metrics import never_absent, scraped, value

from rlhf_common.metrics.catalogue import served_by
from rlhf_common.metrics.exposition import registry_of, text_application
from rlhf_common.metrics.metric import Server
from rlhf_common.samples import SampleKey
from rlhf_workers.compute import Compute, WorkerSnapshot
from rlhf_workers.generation.engine import EngineLoad, StepReport
from rlhf_workers.generation.engine_choice import EngineChoice
from rlhf_workers.generation.engine_totals import EngineTotals, QueueTimes
from rlhf_workers.generation.speculation.speculation_totals import SpeculationTotals
from rlhf_workers.metrics import MAX_ENGINE_SERIES, MeasuredWorker, WorkerCollector
from rlhf_workers.outbox import SessionOutbox

CPU = torch.device("cpu")


class EngineOfOthers(Collector):
    """An engine's metrics, one with the same name as ours."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def collect(self) -> Iterator[Family]:
        for name in self.names:
            if name == "broken":
                raise OSError("gone")
            yield GaugeMetricFamily(name, "Of an engine.", value=3.0)


class Generating:
    """A role with an engine."""

    name = "generation"

    def __init__(self, registry: Collector | None) -> None:
        self.engine_totals = EngineTotals()
        self.engine_choice = EngineChoice("my_package.my_engine", "Named", "the manifest names it")
        self.engine_registry = registry
        self.speculation_totals: SpeculationTotals | None = SpeculationTotals.for_drafters(["Siblings", "Ngram"], 4)


def registry(role: Generating | None = None) -> CollectorRegistry:
    outbox = SessionOutbox("generation-1", lambda: None)
    compute = Compute(CPU, outbox, None, lambda _: None)
    compute.snapshot = WorkerSnapshot(versions={"actor": 4}, active=2)
    if role is not None:
        compute._roles["generation"] = role  # type: ignore[assignment]
    outbox.count(17)
    measured = MeasuredWorker("generation-1", "generation", outbox, compute, CPU, lambda: True)
    return registry_of([WorkerCollector(measured)])


def test_a_worker_serves_the_catalogue() -> None:
    role = Generating(None)
    role.engine_totals.add(StepReport(decoded=4, prefilled=9, prefill_ns=2_000_000, rows=4), 10_000_000)
    served = registry(role)
    declared = {metric.name for metric in served_by(Server.WORKER)}
    on_gpus = {name for name in declared if "device_memory" in name}
    role.engine_totals.load = EngineLoad(3, 1, 0.25, 2, 64, 32)
    families = {family.name + ("_total" if family.type == "counter" else "") for family in served.collect()}
    assert families == declared - on_gpus
    never_absent(served, Server.WORKER)
    assert value(served, "rlhf_worker_tokens_total", worker="generation-1", group="generation") == 17
    assert value(served, "rlhf_worker_weight_version", model="actor") == 4
    assert value(served, "rlhf_worker_connected") == 1
    assert value(served, "rlhf_engine_decode_seconds_total") == pytest.approx(0.008)
    assert value(served, "rlhf_engine_steps_total") == 1
    assert value(served, "rlhf_engine_draft_reason_steps_total", reason="Probe") == 0
    assert value(served, "rlhf_engine_draft_budget_steps_total", budget="8") == 0
    role.speculation_totals = None
    assert not [family for family in served.collect() if "_draft" in family.name]
    assert value(served, "rlhf_engine_kv_used_share") == 0.25


def test_an_engine_that_does_not_say_how_full_it_is_has_no_series_of_it() -> None:
    served = registry(Generating(None))
    assert not [sample for sample in scraped(served) if "kv_used" in sample.name or "waiting" in sample.name]


def test_what_sleeps_gave_back_is_added_up_and_never_less_than_nothing() -> None:
    role = Generating(None)
    for freed in (100, -5, 0, 20):
        role.engine_totals.slept(freed)
    served = registry(role)
    assert (value(served, "rlhf_engine_sleeps_total"), value(served, "rlhf_engine_freed_bytes_total")) == (2, 120)


def test_an_engine_of_others_is_served_beside_ours_and_never_in_place_of_it() -> None:
    served = registry(Generating(EngineOfOthers(["vllm:num_requests_running", "rlhf_worker_connected"])))
    request = {"REQUEST_METHOD": "GET", "PATH_INFO": "/metrics", "HTTP_ACCEPT": "application/openmetrics-text"}
    page = b"".join(text_application(served)(request, lambda status, headers: None)).decode().splitlines()
    assert "vllm:num_requests_running 3.0" in page, "under the very name that its dashboards ask for"
    assert [line for line in page if line.startswith("rlhf_worker_connected{")] == [
        'rlhf_worker_connected{group="generation",worker="generation-1"} 1.0'
    ]


def test_an_engine_that_cannot_say_its_own_hides_nothing_of_ours() -> None:
    served = registry(Generating(EngineOfOthers(["vllm:first", "broken"])))
    assert value(served, "rlhf_worker_tokens_total") == 17
    assert not [sample for sample in scraped(served) if sample.name.startswith("vllm")]


def test_what_an_engine_serves_is_bounded() -> None:
    served = registry(Generating(EngineOfOthers([f"vllm:m{number}" for number in range(2 * MAX_ENGINE_SERIES)])))
    assert sum(sample.name.startswith("vllm") for sample in scraped(served)) == MAX_ENGINE_SERIES


def test_families_with_our_prefixes_use_up_no_room() -> None:
    names = [*(f"rlhf_m{number}" for number in range(10)), *(f"vllm:m{number}" for number in range(MAX_ENGINE_SERIES))]
    served = registry(Generating(EngineOfOthers(names)))
    assert sum(sample.name.startswith("vllm") for sample in scraped(served)) == MAX_ENGINE_SERIES


def test_a_worker_without_an_engine_has_no_series_of_one() -> None:
    assert not [sample for sample in scraped(registry()) if sample.name.startswith("rlhf_engine")]


def test_a_sample_waits_from_the_first_step_that_knows_it_until_its_first_token() -> None:
    times, first, second = QueueTimes(), SampleKey(0, 1, 0), SampleKey(0, 2, 0)
    times.submitted([first, second])
    times.step_begins(1_000_000_000)
    times.began([first], 1_500_000_000)
    times.step_begins(2_000_000_000)
    times.began([second], 4_000_000_000)
    assert (times.of_finished(first), times.of_finished(second)) == (0.5, 3.0)
    assert times.of_finished(first) == 0.0, "told once"
    times.submitted([first])
    times.begin_iteration()
    times.step_begins(0)
    times.began([first], 5)
    assert times.of_finished(first) == 0.0
