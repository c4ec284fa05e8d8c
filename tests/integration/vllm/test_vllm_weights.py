"""New weights in a real vLLM engine: whole or not at all, never mixed, and no key or value of older ones is reused.

The reference is transformers' greedy decoding with the same weights.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.workers.engine_driving import finish, requests, resumed
from tests.support.workers.generation_roles import generate, run
from tests.support.workers.outbox import RecordedOutbox
from tests.support.workers.vllm_policy import CPU, RESPONSE, Policy, Weights
from tests.support.workers.weight_lender import HOST, Lender, ranks

from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import unpack
from rlhf_common.samples import ResponsePart, SampleKey, SampleRequest, VersionSpan
from rlhf_workers.failures import WorkError
from rlhf_workers.generation.engine import EngineError
from rlhf_workers.generation.generation_role import GenerationRole
from rlhf_workers.generation.torch_engine.build import build_engine as build_torch_engine
from rlhf_workers.sample_codec import key_of
from rlhf_workers.shared_memory.choice import lent_by
from rlhf_workers.weights.fetching import FetchedWeights, FetchPolicy, fetch_weights
from rlhf_workers.worker_role import NO_VERSION

pytestmark = pytest.mark.full

UPDATES = 50
LONG_PROMPT = np.arange(45, dtype=np.int32) % 40 + 5
"""Prompt of more than a block of 32 tokens, the unit in which vLLM caches prefixes."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread: threads that wait for each other take longer than they save for a tiny model."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["qwen3", "mixtral", "qwen3_moe"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policy]:
    """Yield a policy whose head is tied to its embeddings, then two with experts, which checkpoints name one by one."""
    policy = Policy(tmp_path_factory.mktemp("policy"), request.param)
    assert ("lm_head.weight" in policy.weights()) == (request.param != "qwen3")
    assert ("model.layers.0.mlp.experts.gate_up_proj" in policy.weights()) == (request.param != "qwen3")
    yield policy
    policy.engine.close()  # before the next: vLLM has one kind of model in a process


@pytest.fixture
def policy(served: Policy) -> Policy:
    """Return the policy at version 1 and without samples."""
    served.engine.withdraw()
    served.update(1)
    return served


def sample(number: int, prompt: Any = LONG_PROMPT, response: int = RESPONSE) -> SampleRequest:
    return SampleRequest(SampleKey(0, number, 0), prompt, number, response)


def decode(policy: Policy, request: SampleRequest) -> tuple[ResponsePart, int]:
    """Return the response, and the number of its tokens that were computed before the first new one."""
    policy.engine.submit([request])
    prefilled = 0
    while policy.engine.in_flight:
        report = policy.engine.step()
        prefilled += report.prefilled
        for response in report.finished:
            if response.key == request.key:
                return response, prefilled
    raise AssertionError("the sample is gone")


@contextmanager
def during_load(policy: Policy, tensors: int, event: Callable[[], object]) -> Iterator[None]:
    """Run `event` when vLLM's loader has read this number of tensors."""
    model: Any = policy.engine._core._core.model_executor.driver_worker.worker.model_runner.get_model()
    load = type(model).load_weights

    def disturbed(named: Iterator[tuple[str, torch.Tensor]]) -> Any:
        def some() -> Iterator[tuple[str, torch.Tensor]]:
            for number, item in enumerate(named):
                if number == tensors:
                    event()
                yield item

        return load(model, some())

    model.load_weights = disturbed
    try:
        yield
    finally:
        del model.load_weights


def test_greedy_tokens_are_those_of_transformers_after_each_of_many_updates(policy: Policy) -> None:
    for version in range(2, UPDATES + 2):
        policy.update(version)
        assert policy.engine.version == version
        assert policy.decodes_right(2), f"after update {version - 1}"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda weights: weights.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda weights: weights.update({"model.norm.bias": torch.zeros(32)}), "model.norm.bias is not a parameter"),
        (lambda weights: weights.update({"model.norm.weight": torch.zeros(3)}), "has shape .3., the model needs .32."),
        (
            lambda weights: weights.update({"model.norm.weight": torch.zeros(32, dtype=torch.int64)}),
            "model.norm.weight is torch.int64, must be one of torch.float32",
        ),
    ],
)
def test_a_set_that_is_not_the_policys_changes_nothing(
    policy: Policy, change: Callable[[dict[str, torch.Tensor]], object], words: str
) -> None:
    wrong = {name: tensor + 1 for name, tensor in policy.weights().items()}
    change(wrong)
    with pytest.raises(WorkError, match=words):
        policy.engine.load_weights(wrong, 2)
    assert policy.engine.version == 1
    assert policy.decodes_right()


def test_a_new_sample_reads_no_keys_and_values_of_older_weights(policy: Policy) -> None:
    _, prefilled = decode(policy, sample(1))
    assert prefilled == len(LONG_PROMPT)
    _, prefilled = decode(policy, sample(2))
    assert prefilled < len(LONG_PROMPT), "the prefix was kept, or this test proves nothing"
    policy.update(2)
    response, prefilled = decode(policy, sample(3))
    assert prefilled == len(LONG_PROMPT)
    assert policy.is_right(response, sample(3))
    policy.engine.load_weights(policy.weights(), 2)  # a version can come again, from a restored group
    assert decode(policy, sample(4))[1] == len(LONG_PROMPT)


def test_nor_those_of_a_sample_that_goes_on_through_an_update(policy: Policy) -> None:
    old = sample(1, response=40)
    policy.engine.submit([old])
    for _ in range(5):
        policy.engine.step()
    policy.update(2)
    response, prefilled = decode(policy, sample(2))
    assert prefilled == len(LONG_PROMPT)
    assert policy.is_right(response, sample(2))
    for _ in range(12):
        policy.engine.step()  # the old sample fills a block of the prefix with older keys and values
    [part] = policy.engine.withdraw()
    assert len(LONG_PROMPT) + len(part.tokens) > 64
    _, prefilled = decode(policy, resumed(old, part))
    assert prefilled == len(LONG_PROMPT) + len(part.tokens) - 32, "only the block that sample 2 computed is read"


def test_a_running_sample_keeps_its_cache_as_in_the_torch_engine(policy: Policy) -> None:
    before, after = policy.weights(), policy.train(2)
    engine, other = policy.engine, build_torch_engine(policy.spec, policy.tokenizer, CPU)
    other.load_weights(before, 1)
    responses = []
    for each in (engine, other):
        each.submit([sample(1, response=40)])
        decoded = 0
        while decoded < 7:
            decoded += each.step().decoded
        each.load_weights(after, 2)
        responses.append(finish(each)[1])
    mine, theirs = responses
    assert mine.tokens.tolist() == theirs.tokens.tolist()
    assert mine.versions == theirs.versions == (VersionSpan(1, 7), VersionSpan(2, len(mine.tokens) - 7))
    np.testing.assert_allclose(mine.log_probabilities, theirs.log_probabilities, atol=1e-4)


def test_an_update_that_breaks_off_leaves_an_engine_that_takes_no_sample_until_a_whole_one(policy: Policy) -> None:
    def gone() -> None:
        raise RuntimeError("the device is gone")

    engine = policy.engine
    engine.submit([sample(1, response=40)])
    engine.step()
    with during_load(policy, 9, gone), pytest.raises(WorkError, match=r"partly replaced.*device is gone") as failure:
        engine.load_weights(policy.train(2), 2)
    assert failure.value.failure.retryable
    assert engine.version == NO_VERSION
    with pytest.raises(EngineError, match="no whole version") as refused:
        engine.submit([sample(2)])
    assert refused.value.reason == "NotReady"
    with pytest.raises(EngineError, match="no whole version"):
        engine.step()
    engine.load_weights(policy.weights(), 2)
    response = finish(engine)[1]
    assert response.versions == (VersionSpan(1, 1), VersionSpan(2, len(response.tokens) - 1))
    assert policy.decodes_right()


class Lent:
    """The `weight_fetcher` of a role. `confirm` runs when a load confirms the weights it read."""

    def __init__(self, tensors: Weights, confirm: Callable[[], None]) -> None:
        self._tensors, self._confirm = tensors, confirm

    @contextmanager
    def __call__(
        self, model: str, version: int, sources: Sequence[pb.WeightLocation], certificates: Path | None
    ) -> Iterator[FetchedWeights]:
        weights = FetchedWeights(dict(self._tensors), {"device_memory": 1})
        weights.confirm = self._confirm  # type: ignore[method-assign]
        yield weights


def test_a_role_keeps_its_samples_still_while_no_whole_version_is_there(policy: Policy) -> None:
    def gone() -> None:
        raise WorkError("WeightsTorn", "the rank went while its memory was read", retryable=True)

    outbox = RecordedOutbox()
    role = GenerationRole(policy.engine, policy.tokenizer, weight_fetcher=Lent(policy.train(2), gone))
    role.handle(generate(2), outbox)
    role.step(outbox)
    load = pb.Command(id=2, load_weights=pb.LoadWeights(model="actor", version=2))
    with pytest.raises(WorkError, match="the rank went"):
        role.handle(load, outbox)
    with pytest.raises(WorkError, match="half-way"):
        role.handle(generate(1, identifier=3), outbox)
    with pytest.raises(EngineError, match="an update broke off after the policy's weights were replaced"):
        policy.engine.submit([sample(4)])
    assert not role.step(outbox)
    assert role.active() == 2
    role._updates._weight_fetcher = Lent(policy.weights(), lambda: None)
    role.handle(load, outbox)
    run(role, outbox)
    assert role.versions() == {"actor": 2}
    assert role.active() == 0


PATIENT = FetchPolicy(attempts=2, backoff_seconds=0.01, describe_seconds=60.0, idle_seconds=60.0)


def load_from(lenders: Sequence[Lender], version: int, identifier: int) -> pb.Command:
    sources = [lender.location for lender in lenders]
    return pb.Command(id=identifier, load_weights=pb.LoadWeights(model="actor", version=version, sources=sources))


def part_of(message: Any) -> ResponsePart:
    """Return the response that a role reported as finished."""
    versions = tuple(VersionSpan(span.version, span.tokens) for span in message.versions)
    return ResponsePart(key_of(message.key), 0, unpack(message.tokens), unpack(message.log_probabilities), versions)


@pytest.mark.parametrize("served", ["qwen3"], indirect=True)
def test_a_rank_killed_in_the_middle_of_a_fetch_changes_no_token_and_the_update_comes_whole_afterwards(
    policy: Policy, tmp_path: Path
) -> None:
    outbox, before = RecordedOutbox(), policy.weights()
    role = GenerationRole(policy.engine, policy.tokenizer, weight_fetcher=partial(fetch_weights, patience=PATIENT))
    role.handle(generate(3, response=20), outbox)
    role.step(outbox)
    with ranks(tmp_path, policy.train(2), 2, 3) as [first, second, restarted], ThreadPoolExecutor(1) as pool:
        first.halt_after(3)
        killed = pool.submit(first.kill_when_halted)
        with pytest.raises(WorkError, match="weights of actor version 2") as failure:
            role.handle(load_from([first, second], 2, 2), outbox)
        killed.result()
        assert failure.value.failure.retryable
        assert role.versions() == {"actor": 1}
        for _ in range(8):
            role.step(outbox)
        role.handle(load_from([restarted, second], 2, 3), outbox)
    assert role.versions() == {"actor": 2}
    role.handle(generate(3, identifier=4, iteration=1, response=RESPONSE), outbox)
    run(role, outbox)
    asked = {request.key.sample: request for request in requests(3)}
    responses = [part_of(message) for message in outbox.reports("finished")]
    assert [len(response.versions) for response in responses if response.key.iteration == 0] == [2, 2, 2]
    new = [response for response in responses if response.key.iteration == 1]
    assert len(new) == 3
    assert all(response.versions == (VersionSpan(2, RESPONSE),) for response in new)
    assert all(policy.is_right(response, asked[response.key.sample]) for response in new)
    policy.put(before)
    for response in responses:
        if response.key.iteration == 0:
            old = response.versions[0]
            assert old == VersionSpan(1, 9), "all steps before the whole update"
            assert policy.is_right(replace(response, tokens=response.tokens[:9]), asked[response.key.sample])


@pytest.mark.parametrize("served", ["qwen3"], indirect=True)
def test_a_rank_killed_while_its_memory_is_read_leaves_the_version_readable_to_its_end(
    policy: Policy, tmp_path: Path
) -> None:
    role = GenerationRole(
        policy.engine, policy.tokenizer, weight_fetcher=partial(fetch_weights, sharings=lent_by(HOST))
    )
    outbox = RecordedOutbox()
    with ranks(tmp_path, policy.train(2), 2, 2) as lenders:
        with during_load(policy, 9, lambda: list(map(Lender.kill, lenders))):
            role.handle(load_from(lenders, 2, 2), outbox)
        assert [kind for kind, _ in outbox.moves] == ["weights_host_memory"]
    assert role.versions() == {"actor": 2}
    assert policy.decodes_right()
