"""A job for coordinator tests: no models, prompts of numbers, simulated workers, and the coordinator in-process."""

import asyncio
import contextlib
import json
import struct
import time
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import yaml
from tests.support import algorithms
from tests.support.coordinator import simulated_results
from tests.support.coordinator.simulated_rank import Pace
from tests.support.coordinator.simulated_worker import Crew, crew
from tests.support.loopback import free_address
from tokenizers import Tokenizer, models, pre_tokenizers

from rlhf_api.algorithms import (
    graph_of,
    has_greedy_baseline,
    prompt_schedule,
    samples_of_batch,
    samples_per_prompt,
)
from rlhf_api.algorithms.iteration_prompts import PromptSchedule
from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_common.names import Group
from rlhf_common.samples import VersionSpan
from rlhf_coordinator.job.job_run import JobOutcome, JobRun
from rlhf_coordinator.loop.recovery import restore_run
from rlhf_coordinator.scheduling.training_schedule import schedule_json
from rlhf_coordinator.service.serving import ServiceAddresses, serve
from rlhf_coordinator.state.fleet import wanted
from rlhf_coordinator.state.job_state import job_context
from rlhf_coordinator.storage.journal import Journal
from rlhf_coordinator.storage.prompts import Prompt, PromptSet, random_key
from rlhf_coordinator.storage.sample_codec import packed, span_messages


def make_job(
    folder: Path, *, algorithm: str = "ppo", iterations: int = 3, batch: int = 16, every: int = 2, **spec: Any
) -> RLHFJob:
    """Return a resolved job; `spec` replaces parts of the spec."""
    policy = folder / "policy"
    policy.mkdir(parents=True, exist_ok=True)
    (policy / "config.json").write_text("{}")
    chosen = algorithms.member(algorithm)
    judges = algorithms.judges(chosen, {"function": {"module": "rewards"}})
    models: dict[str, Any] = {"actor": {"path": str(policy)}, **judges}
    if algorithms.has_critic(chosen):
        models["critic"] = {"path": str(policy)}
    content = {
        "algorithm": chosen,
        "iterations": iterations,
        "seed": 5,
        "models": models,
        "prompts": {"path": str(folder / "prompts.jsonl")},
        "rollout": {"batchSize": batch, "maxResponseTokens": 48},
        "generation": {"replicas": 2, "maxBatchSize": 6},
        "inference": {"replicas": 2},
        "training": {"parallelism": {"pipeline": 2}, "microBatchSize": 4},
        "checkpoints": {"path": str(folder / "checkpoints"), "every": every, "keep": 2},
        "fusion": {"intraStage": {"mode": "Disabled"}, "interStage": {"mode": "Disabled"}},
        "runPolicy": {"workerTimeoutSeconds": 5, "startTimeoutSeconds": 20},
        **spec,
    }
    manifest = {"apiVersion": "rlhf.dev/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "simulated"}}
    return RLHFJob.model_validate({**manifest, "spec": content})


PROMPTS = 11
"""Number of prompts; odd, so that passes end in the middle of iterations."""


def make_prompts(job: RLHFJob, count: int = PROMPTS) -> PromptSet:
    """Return prompts without a tokenizer."""
    item = samples_per_prompt(job.spec)
    lines = [Prompt(n + 1, struct.pack("<2i", n, n + 1), f"p{n}", f'{{"prompt": "p{n}"}}') for n in range(count)]
    return PromptSet(
        lines,
        seed=job.spec.seed,
        shuffle=True,
        schedule=prompt_schedule(job.spec),
        samples_per_prompt=item,
    )


def write_files(folder: Path, **spec: Any) -> RLHFJob:
    """Write manifest, prompts and a tokenizer to disk; return the job."""
    job = make_job(folder, **{"runPolicy": {"workerTimeoutSeconds": 60, "startTimeoutSeconds": 240}, **spec})
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, **{f"p{n}": n + 1 for n in range(20)}}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "policy" / "tokenizer.json"))
    (folder / "policy" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "policy" / "config.json").write_text('{"model_type": "llama"}')
    lines = [json.dumps({"prompt": f"p{n} p{n + 1}"}) for n in range(PROMPTS)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "job.yaml").write_text(yaml.safe_dump(job.model_dump(by_alias=True, exclude_none=True, mode="json")))
    return job


def prompts_of(job: RLHFJob) -> PromptSet:
    """Return the prompts that the process must read from the files of `write_files`."""
    lines = [
        Prompt(n + 1, struct.pack("<2i", n + 1, n + 2), f"p{n} p{n + 1}", json.dumps({"prompt": f"p{n} p{n + 1}"}))
        for n in range(PROMPTS)
    ]
    return PromptSet(
        lines, seed=5, shuffle=True, schedule=PromptSchedule(job.spec.rollout.batch_size), samples_per_prompt=1
    )


def expected_weights(job: RLHFJob, prompts: PromptSet | None = None, failed: Container[tuple[int, int]] = ()) -> str:
    """Return the hash chain of an undisturbed run, from the data. `failed`: (iteration, sample) that failed."""
    prompts, spec = prompts or make_prompts(job), job.spec
    tasks = graph_of(spec).tasks_of(Group.INFERENCE)
    weights = "initial"
    for iteration in range(spec.iterations):
        samples = []
        per_prompt = samples_per_prompt(spec)
        for index in range(samples_of_batch(spec)):
            greedy = has_greedy_baseline(spec) and index % per_prompt == per_prompt - 1
            prompt, drawing = (
                prompts.prompt(iteration, index).tokens,
                pb.DRAWING_GREEDY if greedy else pb.DRAWING_ROLLOUT,
            )
            key = simulated_results.seed_of(random_key(spec.seed, iteration, index), prompt, drawing)
            length = simulated_results.response_length(key, spec.rollout.max_response_tokens)
            tokens, log_probabilities = simulated_results.response(key, 0, length)
            fields: dict[str, pb.Array] = {
                task.produces[0]: packed("float32", simulated_results.score(task.name, tokens)) for task in tasks
            }
            fields["log_probabilities"] = packed("float32", log_probabilities)
            if (iteration, index) in failed:
                samples.append(left_out(index, prompts.group(index), prompt))
                continue
            samples.append(
                pb.TrainSample(
                    sample=index,
                    group=prompts.group(index),
                    prompt=packed("int32", prompt),
                    response=packed("int32", tokens),
                    fields=fields,
                    versions=span_messages([VersionSpan(iteration, length)]),
                    finish_reason="stop",
                )
            )
        weights = simulated_results.next_weights(weights, samples)
    return weights


def left_out(index: int, group: int, prompt: bytes) -> pb.TrainSample:
    """Return the training sample of a failed sample: its prompt, masked out."""
    nothing = packed("int32", b"")
    return pb.TrainSample(
        sample=index,
        group=group,
        prompt=packed("int32", prompt),
        response=nothing,
        fields={"log_probabilities": packed("float32", b"")},
        abstained=True,
    )


UNHURRIED = {"worker_timeout_seconds": 60, "start_timeout_seconds": 240}
"""Run policy for the real clock: a busy machine may stall for seconds, and no worker may be lost because of that."""


class Coordinated:
    """Consecutive coordinators of one job, at one address in one run folder."""

    def __init__(self, job: RLHFJob, folder: Path, certificates: Path | None = None) -> None:
        policy = job.spec.run_policy.model_copy(update=UNHURRIED)
        self.job = job.model_copy(update={"spec": job.spec.model_copy(update={"run_policy": policy})})
        self.folder = folder
        self.address = free_address()
        self.certificates = certificates
        self.run: JobRun | None = None
        self._task: asyncio.Task[JobOutcome] | None = None

    def start(self, *, resume: bool = False) -> JobRun:
        """Start a new coordinator, which resumes from the files on disk."""
        plan = job_context(self.job, schedule_json(self.job.spec))
        journal = Journal(self.folder / "journal")
        self.run, restored = restore_run(plan, journal, make_prompts(self.job), "prompts", self.folder, resume=resume)
        if (settings := self.job.spec.evaluation) is not None:
            self.run.evaluation_prompts = self.run.prompts.first(settings.prompt_count)
        self._task = asyncio.create_task(serve(self.run, restored, ServiceAddresses(self.address, self.certificates)))
        return self.run

    async def outcome(self, seconds: float = 240.0) -> JobOutcome:
        """Return how the job ended."""
        assert self._task is not None
        return await asyncio.wait_for(self._task, seconds)

    def check(self) -> None:
        """Raise if the coordinator has ended, with its own exception if it has one."""
        if self._task is not None and self._task.done():
            raise AssertionError(f"the coordinator has ended: {self._task.result()}")

    async def until(self, phase: str, iteration: int = 0, seconds: float = 120.0) -> None:
        """Wait until the job is in a phase of an iteration, or beyond that iteration."""
        run, end = self.run, time.monotonic() + seconds
        assert run is not None
        while run.state.iteration < iteration or (run.state.iteration == iteration and run.times.phase != phase):
            assert time.monotonic() < end, f"waited for {phase} of {iteration}, is {run.times.phase}"
            await asyncio.sleep(0.002)

    async def until_checkpoint(self, version: int, seconds: float = 120.0) -> None:
        """Wait for a checkpoint of this version."""
        run, end = self.run, time.monotonic() + seconds
        assert run is not None
        while run.state.checkpoint.newest < version:
            assert time.monotonic() < end, f"waited for checkpoint {version}"
            await asyncio.sleep(0)

    async def cancel(self) -> None:
        """Cancel the coordinator's task if it still runs."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._task

    def counts(self) -> Mapping[Group, int]:
        """Return the number of workers of each group."""
        return wanted(self.job.spec)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The reported iterations."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the reported events of a kind."""
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    def messages(self, kind: str) -> list[str]:
        """Return the messages of the events of a kind."""
        return [event["message"] for event in self.events(kind)]


class StartedJobs:
    """The jobs of one test, each with simulated workers; all end with the test."""

    def __init__(self) -> None:
        self._started: list[Coordinated] = []

    def start(self, job: RLHFJob, folder: Path, certificates: Path | None = None) -> Coordinated:
        """Start the coordinator of a job, with its run folder in `folder`."""
        coordinated = Coordinated(job, folder / "run", certificates)
        self._started.append(coordinated)
        coordinated.start()
        return coordinated

    def begin(self, job: RLHFJob, folder: Path, pace: Pace | None = None) -> tuple[Coordinated, Crew]:
        """Start the coordinator of a job, and its workers."""
        coordinated = self.start(job, folder)
        return coordinated, crew(dict(coordinated.counts()), coordinated.address, pace=pace)

    async def end(self) -> None:
        """Cancel all coordinators."""
        for coordinated in self._started:
            await coordinated.cancel()
