"""The contract of every registered engine and of one from outside the project: docs/tutorials/your-engine.md.

No sample is lost or half accepted, progress is reported once, tokens depend only on the sample, and weights change
atomically.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.support.model_folders.models import write_policy
from tests.support.workers.engine_driving import finish, requests, resumed
from tests.support.workers.generation_roles import generate, generation_job, run
from tests.support.workers.outbox import RecordedOutbox

from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import unpack
from rlhf_common.samples import ResponsePart, SampleKey, VersionSpan
from rlhf_workers.failures import WorkError
from rlhf_workers.generation.engine import Engine, EngineError, SamplingParameters, Sleeps, kv_moves_of
from rlhf_workers.generation.engine_registry import ENGINES, build_engine
from rlhf_workers.generation.generation_role import build
from rlhf_workers.generation.vllm_engine import environment
from rlhf_workers.generation.vllm_engine.engine import VllmEngine
from rlhf_workers.generation.vllm_engine.keyed_sampler import KeyedSampler
from rlhf_workers.models.loading import load_tokenizer

OUTSIDE = "your_engine.plain_engine"
NAMES = (*ENGINES, OUTSIDE)
CPU = torch.device("cpu")

Make = Callable[..., Engine]
Build = Callable[[str, int, int], Engine]


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a tiny model with a head size that vLLM's CPU kernels accept."""
    return cache(
        lambda architecture: write_policy(tmp_path_factory.mktemp(architecture) / "policy", architecture, head_dim=32)
    )


@pytest.fixture(scope="module")
def built(policy: Callable[[str], Path]) -> Iterator[Build]:
    """Build an engine like a worker; one of vLLM, which takes a second, is reused by later tests."""
    engines: defaultdict[int, list[Engine]] = defaultdict(list)

    def build(name: str, slots: int, number: int) -> Engine:
        job = job_of(policy, name, slots, speculation={"mode": "Disabled"})  # a step draws one token of each sample
        if name != "vllm":
            return build_engine(job.spec, load_tokenizer(str(policy("llama")), "model"), CPU)
        if number == len(engines[slots]):
            engines[slots].append(build_engine(job.spec, load_tokenizer(str(policy("llama")), "model"), CPU))
        engine = engines[slots][number]
        engine.withdraw()
        engine.load_weights(load_file(policy("llama") / "model.safetensors"), 0)
        return engine

    yield build
    for engine in chain.from_iterable(engines.values()):
        assert isinstance(engine, VllmEngine)
        engine.close()


@pytest.fixture
def make(name: str, built: Build) -> Make:
    """Return a function that builds a new empty engine at each call: make(slots=2)."""
    taken: Counter[int] = Counter()

    def make_engine(slots: int = 8) -> Engine:
        taken[slots] += 1
        return built(name, slots, taken[slots] - 1)

    return make_engine


@pytest.mark.full(quick=6)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": np.zeros(0, np.int32)}, "the prompt has 0 tokens, must have 1 to 48"),
        ({"prompt": np.full(49, 5, np.int32)}, "the prompt has 49 tokens"),
        ({"prompt": np.array([5, 999], np.int32)}, "prompt token 999 is outside the vocabulary"),
        ({"max_response_tokens": 41}, "asked for 41 response tokens in total with 0 known, must be 1 to 40"),
        ({"max_response_tokens": 0}, "asked for 0 response tokens"),
        ({"tokens": np.array([5], np.int32)}, "do not match its 1 known tokens"),
        ({"key": SampleKey(0, 0, 0)}, "sample 0 of iteration 0 is already in this engine"),
    ],
)
def test_a_wrong_request_is_named_and_none_of_its_batch_is_taken(
    change: dict[str, Any], words: str, make: Make
) -> None:
    engine = make()
    good, bad = requests(2, response=10)
    with pytest.raises(EngineError, match=words):
        engine.submit([good, replace(bad, **change)])
    assert engine.in_flight == 0
    assert not engine.step().finished


@pytest.mark.full(quick=1)
def test_progress_reports_every_token_exactly_once(make: Make) -> None:
    engine = make(slots=3)
    engine.submit(requests(7, response=25))
    reported: dict[int, list[int]] = {}
    for step in range(200):
        for response in engine.step().finished:
            earlier = reported.pop(response.key.sample, [])
            assert response.tokens.tolist()[: len(earlier)] == earlier
        if step % 3 == 0:
            for part in engine.progress():
                assert part.offset == len(reported.setdefault(part.key.sample, []))
                assert sum(span.tokens for span in part.versions) == len(part.log_probabilities) == len(part.tokens)
                reported[part.key.sample] += part.tokens.tolist()
        if not engine.in_flight:
            break
    assert not engine.in_flight
    assert not engine.progress()


def test_a_step_reports_what_it_decoded(make: Make) -> None:
    engine = make()
    engine.submit(requests(3, response=10))
    decoded, tokens, began = 0, 0, list[SampleKey]()
    while engine.in_flight:
        report = engine.step()
        decoded += report.decoded
        began += report.began
        tokens += sum(len(response.tokens) for response in report.finished)
        assert {response.key for response in report.finished} <= set(began) or not began
    assert decoded == tokens > 0
    assert len(began) in (0, 3), "an engine that can tell says of each sample once when it began"
    assert len(set(began)) == len(began)


def test_withdraw_returns_queued_and_decoding_samples_and_ignores_unknown_ones(make: Make) -> None:
    engine = make(slots=2)
    samples = requests(4, response=30)
    engine.submit(samples)
    for _ in range(5):
        engine.step()
    withdrawn = engine.withdraw([samples[0].key, samples[3].key, SampleKey(9, 9, 9)])
    assert {response.key.sample: len(response.tokens) for response in withdrawn} == {0: 5, 3: 0}
    assert engine.in_flight == 2
    assert len(engine.withdraw()) == 2
    assert engine.in_flight == 0


def test_a_sample_of_another_attempt_is_not_withdrawn(make: Make) -> None:
    engine = make()
    sample = requests(1)[0]
    engine.submit([sample])
    assert engine.withdraw([sample.key._replace(attempt=1)]) == []
    assert engine.in_flight == 1


@pytest.mark.full(quick=1)
def test_tokens_depend_on_the_sample_alone(make: Make) -> None:
    """Alone, among others, and interrupted and resumed on another engine."""
    samples = requests(5, seed=4, response=20)
    undisturbed = finish(make(), samples)
    assert tokens_of(finish(make(slots=1), samples)) == tokens_of(undisturbed)
    first, second = make(), make()
    first.submit(samples)
    finished: dict[int, ResponsePart] = {}
    for _ in range(6):
        finished |= {response.key.sample: response for response in first.step().finished}
    by_key = {sample.key: sample for sample in samples}
    second.submit([resumed(by_key[response.key], response) for response in first.withdraw()])
    assert tokens_of(finished | finish(second)) == tokens_of(undisturbed)


def test_engines_draw_the_same_tokens(built: Build) -> None:
    samples = requests(3, seed=5, response=20)
    responses = [finish(built(name, 8, 0), samples) for name in NAMES]
    first = responses[0]
    for other in responses[1:]:
        assert tokens_of(other) == tokens_of(first)
        for number, response in other.items():
            np.testing.assert_allclose(response.log_probabilities, first[number].log_probabilities, atol=1e-4)


def test_vllm_draws_by_key_whatever_the_environment_says_or_does_not_start() -> None:
    """Its second model runner draws in its own kernels."""
    said = {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_CONFIGURE_LOGGING": "1"}
    environment.prepare(said)
    assert said["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert said["VLLM_CONFIGURE_LOGGING"] == "1", "which promises nothing"
    with pytest.raises(TypeError, match="model runner dict is not the one whose sampler is replaced"):
        KeyedSampler({}, SamplingParameters())


def test_a_response_that_was_complete_before_is_finished_without_another_token(make: Make) -> None:
    sample = requests(1, response=10)[0]
    whole = finish(make(), [sample])[0]
    engine = make()
    engine.submit([resumed(sample, whole)])
    report = engine.step()
    assert [response.tokens.tolist() for response in report.finished] == [whole.tokens.tolist()]
    assert report.decoded == 0


def test_weights_are_replaced_whole_and_tokens_bear_their_version(make: Make, policy: Callable[[str], Path]) -> None:
    weights = load_file(policy("llama") / "model.safetensors")
    engine = make(slots=2)
    sample = requests(1, response=12)[0]
    undisturbed = finish(make(), [sample])[0]
    engine.submit([sample])
    for _ in range(4):
        engine.step()
    half = dict(list(weights.items())[:5])
    with pytest.raises(WorkError, match=r"actor version 1: .* is missing"):
        engine.load_weights({name: tensor + 1 for name, tensor in half.items()}, 1)
    misshapen = {**weights, "model.norm.weight": torch.zeros(3)}
    with pytest.raises(WorkError, match=r"model.norm.weight has shape \[3\], the model needs \[32\]"):
        engine.load_weights(misshapen, 1)
    assert engine.version == 0
    assert engine.load_weights(weights, 3) == sum(tensor.nbytes for tensor in weights.values())
    assert engine.version == 3
    response = finish(engine)[0]
    assert response.tokens.tolist() == undisturbed.tokens.tolist()
    assert response.versions == (VersionSpan(0, 4), VersionSpan(3, len(response.tokens) - 4))


def test_a_policy_without_probabilities_is_an_error_not_a_token(make: Make, policy: Callable[[str], Path]) -> None:
    weights = load_file(policy("llama") / "model.safetensors")
    engine = make()
    engine.submit(requests(1))
    engine.load_weights({name: tensor * float("nan") for name, tensor in weights.items()}, 8)
    with pytest.raises(EngineError, match="weight version 8 of the actor"):
        engine.step()
    assert len(engine.withdraw()) == 1


def test_an_engine_that_sleeps_gives_its_samples_up_first_and_goes_on_after(make: Make) -> None:
    engine = make()
    if not isinstance(engine, Sleeps):
        return
    samples = requests(3, response=10)
    first = finish(engine, samples)
    engine.submit(samples)
    with pytest.raises(EngineError, match="3 samples must be withdrawn"):
        engine.sleep()
    engine.withdraw()
    engine.sleep()
    engine.wake()
    assert tokens_of(finish(engine, samples)) == tokens_of(first)


def test_an_engine_that_moves_caches_keeps_the_tokens(make: Make) -> None:
    home, away = make(), make()
    home_moves, away_moves = kv_moves_of(home), kv_moves_of(away)
    if home_moves is None or away_moves is None:
        return
    sample = requests(1, seed=8, response=20)[0]
    undisturbed = finish(make(), [sample])
    home.submit([sample])
    for _ in range(5):
        home.step()
    assert home_moves.layout == away_moves.layout
    cached = home_moves.cached(sample.key)
    assert cached
    assert away_moves.reserve()
    away_moves.admit(home_moves.carried(sample.key), home_moves.export(sample.key, 0, cached))
    home.withdraw([sample.key])
    assert tokens_of(finish(away)) == tokens_of(undisturbed)


@pytest.mark.full(quick=1)
def test_it_decodes_in_a_role(name: str, policy: Callable[[str], Path]) -> None:
    """Every command of the coordinator is answered, with any abilities of the engine."""
    command = pb.Command(id=1, become_generation=pb.BecomeGeneration(weights=pb.LoadWeights(model="actor")))
    role = build(job_of(policy, name, 8), command, CPU, None)
    outbox = RecordedOutbox()
    role.handle(generate(2), outbox)
    moved = pb.MigrateSample(key=pb.SampleKey(sample=1, attempt=2), new_attempt=3)
    role.handle(pb.Command(id=2, migrate=pb.Migrate(destination="127.0.0.1:1", samples=[moved])), outbox)
    run(role, outbox)
    while len(outbox.reports("done")) < 2:
        role.step(outbox)
    role.handle(pb.Command(id=3, offload=pb.Offload(role="generation")), outbox)
    assert sorted(done.command_id for done in outbox.reports("done")) == [1, 2, 3]
    assert [len(unpack(message.tokens)) > 0 for message in outbox.reports("finished")] == [True, True]
    role.offload()
    role.close()


def test_a_role_whose_engine_does_not_measure_says_so(policy: Callable[[str], Path]) -> None:
    """The coordinator then runs the job without inter-stage fusion."""
    role = build(generation_job(policy("llama"), engine=OUTSIDE), pb.Command(), CPU, None)
    with pytest.raises(WorkError, match="this worker's engine does not measure its costs"):
        role.handle(pb.Command(id=4, measure=pb.Measure(role="generation")), RecordedOutbox())


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("my_package.absent", "module my_package.absent cannot be loaded: .*No module named 'my_package'"),
        ("json.decoder", r"module json.decoder has no build_engine\(spec, tokenizer, device\)"),
        ("tests.support.jobs.no_engine", "returned a dict, not an Engine: it lacks version, submit, step"),
    ],
)
def test_a_module_that_is_no_engine_is_named(engine: str, words: str, policy: Callable[[str], Path]) -> None:
    job = generation_job(policy("llama"), engine=engine)
    with pytest.raises(WorkError, match=words) as raised:
        build_engine(job.spec, None, CPU)
    assert raised.value.failure.field == "spec.generation.engine"


def job_of(policy: Callable[[str], Path], name: str, slots: int, **generation: Any) -> RLHFJob:
    """Return a job, deterministic if the engine keeps bits."""
    return generation_job(policy("llama"), deterministic=name != "vllm", engine=name, maxBatchSize=slots, **generation)


def tokens_of(responses: dict[int, ResponsePart]) -> dict[int, list[int]]:
    return {number: response.tokens.tolist() for number, response in responses.items()}
