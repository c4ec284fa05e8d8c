"""The generation role in tests: a job for it, commands, and a clock with even steps."""

from pathlib import Path
from typing import Any

from tests.support.workers.engine_driving import requests
from tests.support.workers.outbox import RecordedOutbox

from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import pack
from rlhf_workers.generation.generation_role import GenerationRole

STEP_NS = 30_000_000


class SteppingClock:
    """A clock that advances 30 ms on every reading."""

    def __init__(self) -> None:
        self.now = 10**18

    def __call__(self) -> int:
        self.now += STEP_NS
        return self.now


def generate(count: int, *, identifier: int = 1, iteration: int = 0, response: int = 40) -> pb.Command:
    samples = [
        pb.GenerateSample(
            key=pb.SampleKey(iteration=iteration, sample=request.key.sample, attempt=2),
            prompt=pack(request.prompt),
            random_key=request.random_key,
            max_response_tokens=response,
        )
        for request in requests(count)
    ]
    return pb.Command(id=identifier, generate=pb.Generate(samples=samples))


def run(role: GenerationRole, outbox: RecordedOutbox) -> None:
    while role.step(outbox):
        pass


def generation_job(folder: Path, *, deterministic: bool = True, **generation: Any) -> RLHFJob:
    return RLHFJob.model_validate(
        {
            "apiVersion": "rlhf.dev/v1alpha1",
            "kind": "RLHFJob",
            "metadata": {"name": "test"},
            "spec": {
                "algorithm": {"grpo": {}},
                "deterministic": deterministic,
                "models": {"actor": {"path": str(folder)}, "reward": {"function": {"file": "reward.py"}}},
                "prompts": {"path": "prompts.jsonl"},
                "rollout": {"maxPromptTokens": 48, "maxResponseTokens": 40},
                "generation": generation,
            },
        }
    )
