"""vLLM decodes the tokens of one undisturbed engine, despite all disturbances of the samples.

Real engines in float32. The disturbed ones have little room: prompts are prefilled in chunks, caches run out, so that
samples are preempted and computed again, and prefixes are shared. At random moments of a seed, samples are withdrawn,
continue elsewhere by their tokens, and move with their caches while they are decoded. The same is repeated with right
and wrong drafts, which extend over the ends of blocks and of responses.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.model_folders.models import write_policy
from tests.support.workers.disturbances import Disturbed, Happened, sharing_prompts
from tests.support.workers.engine_driving import finish, requests
from tests.support.workers.generation_roles import generation_job
from tests.support.workers.scripted_drafts import ScriptedSpeculator

from rlhf_api.job import RLHFJob
from rlhf_common.samples import ResponsePart, SampleRequest
from rlhf_workers.generation.engine import Engine
from rlhf_workers.generation.engine_registry import build_engine
from rlhf_workers.generation.vllm_engine.engine import VllmEngine
from rlhf_workers.models.loading import load_causal_lm, load_tokenizer

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

CPU = torch.device("cpu")
SEEDS = int(os.environ.get("RLHF_TOKEN_SEEDS", "100"))  # more seeds for changes of the sampler or of moves
MIXED_SEEDS = 10
PROMPT, RESPONSE = 64, 24
LONGEST_DRAFT = 8
CRAMPED: dict[str, Any] = {"max_num_batched_tokens": 24, "num_gpu_blocks_override": 7}
"""Engine arguments: less than a prompt in a step, and blocks for two of the longest samples."""
SAMPLING: dict[str, dict[str, Any]] = {
    "whole distribution": {},
    "cut distribution": {"temperature": 0.7, "topP": 0.9, "topK": 12, "stop": ["a1", "="], "stopTokenIds": [9]},
}
TOLERANCE = 1e-4
"""Tolerance of log-probabilities in float32."""
NEAR = 1e-5
"""Tolerance of log-probabilities between engines, which run passes of different shapes."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: more threads only wait for each other in models this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a policy with heads of size 32: vLLM's kernels for CPU accept no smaller ones."""
    sizes: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    return write_policy(tmp_path_factory.mktemp("vllm") / "policy", **sizes)


def job_of(folder: Path, sampling: dict[str, Any], engine: str, **engine_args: Any) -> RLHFJob:
    job = generation_job(folder, deterministic=False, engine=engine, maxBatchSize=8, engineArgs=engine_args)
    whole = job.model_dump(by_alias=True)
    whole["spec"]["rollout"] |= {"maxPromptTokens": PROMPT, "maxResponseTokens": RESPONSE, **sampling}
    return RLHFJob.model_validate(whole)


def build_vllm(folder: Path, sampling: dict[str, Any], **engine_args: Any) -> VllmEngine:
    engine = build(folder, sampling, **engine_args)
    assert isinstance(engine, VllmEngine)
    return engine


def build(folder: Path, sampling: dict[str, Any], engine: str = "vllm", **engine_args: Any) -> Engine:
    spec = job_of(folder, sampling, engine, **engine_args).spec
    return build_engine(spec, load_tokenizer(str(folder), "model"), CPU)


class EngineTrio:
    """Three engines that sample alike: one with room that decodes token by token, and two with little room."""

    def __init__(self, folder: Path, sampling: dict[str, Any]) -> None:
        self.undisturbed = build_vllm(folder, sampling)
        self.undisturbed.draft_by(None)
        self.cramped = [build_vllm(folder, sampling, **CRAMPED) for _ in range(2)]
        self.temperature = float(sampling.get("temperature", 1.0))


@pytest.fixture(scope="module")
def trios(folder: Path) -> dict[str, EngineTrio]:
    return {name: EngineTrio(folder, sampling) for name, sampling in SAMPLING.items()}


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load_causal_lm(str(folder), field="model", dtype=torch.float32, device=CPU, attention="eager")


@pytest.fixture
def preempted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the requests that a scheduler of vLLM preempted for lack of room."""
    from vllm.v1.core.sched.scheduler import Scheduler

    names: list[str] = []
    preempt = Scheduler._preempt_request

    def counted(self: Any, request: Any, *arguments: Any, **named: Any) -> None:
        names.append(request.request_id)
        preempt(self, request, *arguments, **named)

    monkeypatch.setattr(Scheduler, "_preempt_request", counted)
    return names


def tokens_of(responses: dict[int, ResponsePart]) -> dict[int, list[int]]:
    return {number: response.tokens.tolist() for number, response in responses.items()}


def far_from_transformers(
    model: Any, samples: Sequence[SampleRequest], responses: dict[int, ResponsePart], temperature: float
) -> float:
    """Return the largest difference of a log-probability from one pass of transformers over the whole sample."""
    worst = 0.0
    for sample in samples:
        response = responses[sample.key.sample]
        whole = torch.from_numpy(np.concatenate([sample.prompt, response.tokens]).astype(np.int64))
        with torch.inference_mode():
            logits = model(whole[None], use_cache=False).logits[0, len(sample.prompt) - 1 : -1]
        wanted = torch.log_softmax(logits / temperature, -1).gather(1, whole[len(sample.prompt) :, None])[:, 0]
        worst = max(worst, float(np.abs(response.log_probabilities - wanted.numpy()).max()))
    return worst


@pytest.mark.parametrize("name", SAMPLING)
def test_disturbed_samples_keep_their_tokens(
    name: str, trios: dict[str, EngineTrio], model: Any, preempted: list[str]
) -> None:
    trio, happened, reasons, decoded = trios[name], Happened(), set[str](), 0
    chosen = list(SAMPLING).index(name)
    for seed in range(chosen, SEEDS, len(SAMPLING)):
        samples = sharing_prompts(1 + seed % 16, seed=seed, longest=PROMPT, response=RESPONSE)
        wanted = finish(trio.undisturbed, samples)
        disturbed = Disturbed(trio.cramped, np.random.default_rng(seed))
        got = disturbed.run(samples)
        assert tokens_of(got) == tokens_of(wanted), f"seed {seed}, {disturbed.happened}"
        assert far_from_transformers(model, samples, got, trio.temperature) < TOLERANCE, f"seed {seed}"
        happened += disturbed.happened
        reasons |= {response.finish_reason for response in got.values()}
        decoded += sum(len(response.tokens) for response in got.values())
    said = f"{happened}, {len(preempted)} pushed out, {decoded} tokens"
    print(said)
    assert min(happened.withdrawn, happened.resumed, happened.changed_engines) > SEEDS, said
    assert len(preempted) > SEEDS // 10, said
    assert happened.moved > SEEDS, said
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize("name", SAMPLING)
def test_drafts_change_no_token(name: str, trios: dict[str, EngineTrio], preempted: list[str]) -> None:
    trio, happened = trios[name], Happened()
    chosen, speculators = list(SAMPLING).index(name), list[ScriptedSpeculator]()
    for seed in range(chosen, SEEDS, len(SAMPLING)):
        samples = sharing_prompts(1 + seed % 16, seed=seed, longest=PROMPT, response=RESPONSE)
        wanted = finish(trio.undisturbed, samples)
        drafting = [
            ScriptedSpeculator(
                np.random.default_rng((seed, number)),
                longest=1 + seed // len(SAMPLING) % LONGEST_DRAFT,
                fixed=seed % 3 > 0,
                answers=tokens_of(wanted),
            )
            for number in range(len(trio.cramped))
        ]
        for engine, speculator in zip(trio.cramped, drafting, strict=True):
            engine.draft_by(speculator)
        disturbed = Disturbed(trio.cramped, np.random.default_rng(seed))
        got = disturbed.run(samples)
        assert tokens_of(got) == tokens_of(wanted), f"seed {seed}, {disturbed.happened}"
        assert all(response.finish_reason == wanted[number].finish_reason for number, response in got.items())
        far = [
            np.abs(response.log_probabilities - wanted[number].log_probabilities) for number, response in got.items()
        ]
        assert np.concatenate(far).max() < NEAR, f"seed {seed}"
        assert not any(speculator.decoding for speculator in drafting), "it is told of every end"
        happened += disturbed.happened
        speculators += drafting
    for engine in trio.cramped:
        engine.draft_by(None)
    drafted, accepted = (
        sum(speculator.drafted for speculator in speculators),
        sum(speculator.accepted for speculator in speculators),
    )
    said = f"{happened}, {len(preempted)} pushed out, {accepted} of {drafted} drafted tokens accepted"
    print(said)
    assert accepted > 5 * SEEDS, said
    assert drafted - accepted > 5 * SEEDS, said
    assert min(happened.withdrawn, happened.moved) > SEEDS // 2, said


def test_samples_change_between_vllm_and_torch_by_their_tokens(trios: dict[str, EngineTrio], folder: Path) -> None:
    name = "cut distribution"
    trio, happened = trios[name], Happened()
    engines: list[Engine] = [trio.cramped[0], build(folder, SAMPLING[name], "torch")]
    for seed in range(200, 200 + MIXED_SEEDS):
        samples = sharing_prompts(6, seed=seed, longest=PROMPT, response=RESPONSE)
        disturbed = Disturbed(engines, np.random.default_rng(seed))
        got = disturbed.run(samples)
        assert tokens_of(got) == tokens_of(finish(trio.undisturbed, samples)), f"seed {seed}, {disturbed.happened}"
        happened += disturbed.happened
    assert happened.changed_engines > MIXED_SEEDS, happened
    assert happened.moved == 0, "one engine's caches are nothing to the other"


def test_a_group_of_one_prompt_shares_its_prefill_and_draws_by_key(trios: dict[str, EngineTrio]) -> None:
    """Use the same prompt eight times in one batch, as in GRPO; the prefix cache shares its blocks."""
    engine = trios["whole distribution"].undisturbed
    first = replace(requests(1, seed=11, longest=1)[0], prompt=np.arange(5, 5 + 40).astype(np.int32))
    group = [
        replace(first, key=first.key._replace(sample=number), random_key=first.random_key + number)
        for number in range(8)
    ]
    group = [replace(sample, max_response_tokens=RESPONSE) for sample in group]
    engine.submit(group)
    together: dict[int, ResponsePart] = {}
    prefilled = 0
    while engine.in_flight:
        report = engine.step()
        prefilled += report.prefilled
        together |= {response.key.sample: response for response in report.finished}
    assert prefilled < len(group) * len(first.prompt), "the prompt's blocks are computed once"
    for sample in group:
        assert tokens_of(finish(engine, [sample])) == {sample.key.sample: together[sample.key.sample].tokens.tolist()}
    assert len({response.tokens.tobytes() for response in together.values()}) == len(group)
