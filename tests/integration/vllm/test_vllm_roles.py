"""The interface of a vLLM engine for the rest of the system, on real engines.

It releases memory and takes it back, measures costs without changing its samples, and has metrics for its dashboards.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from prometheus_client.registry import CollectorRegistry
from safetensors.torch import load_file
from tests.support.model_folders.models import write_policy
from tests.support.observability.served_metrics import value
from tests.support.workers.engine_driving import finish, requests
from tests.support.workers.generation_roles import generate, generation_job, run
from tests.support.workers.outbox import RecordedOutbox

from rlhf_common.metrics.exposition import registry_of, text_application
from rlhf_common.samples import ResponsePart
from rlhf_observability.dashboards.engine import ENGINE_DASHBOARD
from rlhf_workers.compute import Compute
from rlhf_workers.devices.device import memory_in_use
from rlhf_workers.generation.engine import EngineCosts, EngineError
from rlhf_workers.generation.generation_role import GenerationRole
from rlhf_workers.generation.vllm_engine import decode_costs
from rlhf_workers.generation.vllm_engine.build import build_engine
from rlhf_workers.generation.vllm_engine.engine import VllmEngine
from rlhf_workers.metrics import MeasuredWorker, WorkerCollector
from rlhf_workers.models.loading import load_tokenizer
from rlhf_workers.outbox import SessionOutbox

pytestmark = pytest.mark.full


CPU = torch.device("cpu")
SLOTS = 6
ROOM = 128 * 2**20
"""Bytes of caches: far more than anything else that a test allocates or frees meanwhile."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model that vLLM serves on a CPU."""
    return write_policy(tmp_path_factory.mktemp("policy"), head_dim=32)


@pytest.fixture(scope="module")
def built(policy: Path) -> Iterator[VllmEngine]:
    """Yield one engine for all tests."""
    job = generation_job(
        policy, deterministic=False, engine="vllm", maxBatchSize=SLOTS, engineArgs={"kv_cache_memory_bytes": ROOM}
    )
    engine = build_engine(job.spec, load_tokenizer(str(policy), "model"), CPU)
    yield engine
    engine.close()


@pytest.fixture
def engine(built: VllmEngine, policy: Path) -> VllmEngine:
    """Return the engine, empty and awake, with its first weights."""
    built.withdraw()
    built.wake()
    built.load_weights(load_file(policy / "model.safetensors"), 0)
    return built


def tokens_of(responses: dict[int, ResponsePart]) -> dict[int, list[int]]:
    return {number: response.tokens.tolist() for number, response in responses.items()}


def measured(engine: VllmEngine, between: dict[int, ResponsePart] | None = None) -> EngineCosts:
    """Return the costs; samples that finish in steps between two points go to `between`."""
    pieces = engine.measure()
    while True:
        try:
            next(pieces)
        except StopIteration as stop:
            costs: EngineCosts = stop.value
            return costs
        if between is not None:
            between |= {response.key.sample: response for response in engine.step().finished}


def test_sleep_gives_the_memory_of_the_caches_back_and_changes_no_token(engine: VllmEngine) -> None:
    samples = requests(4, seed=1)
    first = tokens_of(finish(engine, samples))
    engine.submit(samples)
    with pytest.raises(EngineError, match="4 samples must be withdrawn before sleep"):
        engine.sleep()
    engine.withdraw()
    before = memory_in_use(CPU)
    engine.sleep()
    without = memory_in_use(CPU)
    engine.sleep()
    assert before - without > 0.9 * ROOM
    engine.wake()
    engine.wake()
    assert memory_in_use(CPU) - without > 0.9 * ROOM
    assert tokens_of(finish(engine, samples)) == first
    assert engine.load.prefix_hits <= engine.load.prefix_tokens


def test_weights_that_come_to_a_sleeping_engine_are_those_it_wakes_with(engine: VllmEngine, policy: Path) -> None:
    weights, samples = load_file(policy / "model.safetensors"), requests(4, seed=2)
    first = tokens_of(finish(engine, samples))
    changed = {name: tensor * 0.5 for name, tensor in weights.items()}
    engine.load_weights(changed, 1)
    others = tokens_of(finish(engine, samples))
    assert others != first
    for tensors, version, expected in ((weights, 2, first), (changed, 3, others)):
        engine.sleep()
        without = memory_in_use(CPU)
        engine.load_weights(tensors, version)
        assert memory_in_use(CPU) - without < 0.5 * ROOM, "the caches are not needed for it"
        engine.wake()
        assert tokens_of(finish(engine, samples)) == expected


def test_measuring_leaves_the_samples_and_their_caches_as_they_are(engine: VllmEngine) -> None:
    samples = requests(5, seed=3)
    undisturbed = tokens_of(finish(engine, samples))
    engine.submit(samples)
    done = {response.key.sample: response for response in engine.step().finished}
    prefilled = 0
    while not done and engine.in_flight == len(samples) and prefilled < 2:
        engine.step()
        prefilled += 1
    before = engine.load
    costs = measured(engine, done)
    assert costs.decode
    assert costs.prefill
    done |= finish(engine)
    assert tokens_of(done) == undisturbed
    assert engine.load.preemptions == before.preemptions, "nobody lost a cache to made-up work"
    assert (engine.in_flight, engine.load.running) == (0, 0)


def test_the_grid_covers_what_a_planner_asks_for(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_costs, "BUDGET_SECONDS", 60.0)
    costs = measured(engine)
    assert {cost.batch for cost in costs.decode} == {1, 2, 4, SLOTS}
    assert len({cost.tokens for cost in costs.decode}) == 4
    assert {cost.batch for cost in costs.prefill} == {1, 4, SLOTS}
    assert all(cost.seconds > 0 for cost in (*costs.decode, *costs.prefill))
    assert (costs.max_batch_size, costs.replays) == (SLOTS, False)
    layers_keys_and_values = 2 * 2 * 2 * 32 * 4
    assert costs.kv_bytes_per_token == layers_keys_and_values
    assert 0.9 * ROOM < costs.kv_room_bytes <= ROOM
    monkeypatch.setattr(decode_costs, "BUDGET_SECONDS", 0.0)
    corners = measured(engine)
    assert [cost.batch for cost in corners.decode] == [1, SLOTS, 1, SLOTS]
    assert len({cost.tokens for cost in corners.decode}) == len(corners.prefill) == 2


def test_a_worker_serves_what_dashboards_ask_of_it_and_what_vllm_counts_of_itself(
    engine: VllmEngine, policy: Path
) -> None:
    role = GenerationRole(engine, load_tokenizer(str(policy), "model"), in_use=lambda: memory_in_use(CPU))
    outbox = RecordedOutbox()
    for command in (generate(3, identifier=1), generate(3, identifier=2, iteration=1)):
        role.handle(command, outbox)
        run(role, outbox)
    role.offload()
    served = _served(role)
    page = _page(served)
    names = {re.split(r"[{ ]", line)[0] for line in page}
    asked = {name for name in _asked() if name.startswith("rlhf_engine")}
    assert len(asked) > 8
    assert asked <= names
    assert value(served, "rlhf_engine_freed_bytes_total") > 0.9 * ROOM
    assert value(served, "rlhf_engine_prefix_tokens_total") > 0
    own = {
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
        "vllm:num_preemptions_total", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
        "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_count",
    }  # fmt: skip
    assert own <= names
    [drawn] = [line.split()[-1] for line in page if line.startswith("vllm:generation_tokens_total")]
    assert float(drawn) >= outbox.tokens > 0


def _served(role: GenerationRole) -> CollectorRegistry:
    outbox = SessionOutbox("generation-0", lambda: None)
    compute = Compute(CPU, outbox, None, lambda _: None)
    compute._roles["generation"] = role
    worker = MeasuredWorker("generation-0", "generation", outbox, compute, CPU, lambda: True)
    return registry_of([WorkerCollector(worker)])


def _page(registry: CollectorRegistry) -> list[str]:
    """Return the lines that a scraper reads."""
    request = {"REQUEST_METHOD": "GET", "PATH_INFO": "/metrics", "HTTP_ACCEPT": "application/openmetrics-text"}
    return b"".join(text_application(registry)(request, lambda status, headers: None)).decode().splitlines()


def _asked() -> set[str]:
    """Return the series that the engine's dashboard queries."""
    queries = (query.expression for row in ENGINE_DASHBOARD.rows for panel in row.panels for query in panel.queries)
    return {name for query in queries for name in re.findall(r"\brlhf_\w+", query)}
