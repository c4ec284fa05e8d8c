"""Measures seconds of one training iteration by phase, on real ranks over gloo or NCCL.

    python benchmarks/training.py [--pipeline 2] [--data 1] [--samples 64] [--json]

Builds a random Llama of the requested size and forks one process per rank (pinned to a core each if there are enough).
It trains `--iterations` iterations (advantages, epochs, mini-batches) of actor and critic on random samples, and
prints the median iteration after a warm-up. Phases are those of the slowest rank: forward, backward and waiting are
spans of the executor; the rest is time that no span covers. `cpu_seconds_per_rank` is the processor time of an
iteration, the figure to compare on a shared machine.
"""

import argparse
import json
import logging
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from rlhf_api.algorithms import full_graph
from rlhf_api.algorithms.graph import SAMPLED_FIELD
from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import pack
from rlhf_common.schedule import Pipeline
from rlhf_planner.schedule.serial import serial_table
from rlhf_workers.training.backends.torch_backend import build_trainer, join
from rlhf_workers.training.batches.training_batch import batch_from

FIELDS = (SAMPLED_FIELD, *full_graph("ppo").scored_fields)
PHASES = {"F": "forward", "B": "backward", "wait-F": "waiting", "wait-B": "waiting"}
VOCABULARY = 512


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("pipeline", 2), ("data", 1), ("samples", 64), ("mini-batch", 64), ("micro-batch", 8), ("prompt", 8),
        ("response", 12), ("hidden", 96), ("layers", 4), ("iterations", 6), ("epochs", 1), ("seed", 0),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return parser.parse_args()


def write_model(folder: Path, options: argparse.Namespace) -> int:
    """Write a random Llama; return its number of parameters."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden,
        intermediate_size=2 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    torch.manual_seed(options.seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def samples_of(options: argparse.Namespace, iteration: int) -> list[pb.TrainSample]:
    """Return random samples whose lengths vary around the requested ones."""
    rng = np.random.default_rng([options.seed, iteration])
    samples = []
    for index in range(options.samples):
        length = int(rng.integers(max(1, options.response // 2), 3 * options.response // 2 + 1))
        samples.append(sample_of(rng, index, options.prompt, length))
    return samples


def sample_of(rng: np.random.Generator, index: int, prompt: int, response: int) -> pb.TrainSample:
    """Return a random sample of PPO with so many tokens."""
    fields = {name: rng.normal(-1, 0.1, 1 if name == "reward" else response) for name in FIELDS}
    return pb.TrainSample(
        sample=index,
        group=index,
        prompt=pack(rng.integers(3, VOCABULARY, prompt).astype(np.int32)),
        response=pack(rng.integers(3, VOCABULARY, response).astype(np.int32)),
        fields={name: pack(value.astype(np.float32)) for name, value in fields.items()},
    )


def job_of(folder: Path, options: argparse.Namespace) -> RLHFJob:
    """Return the job."""
    model = {"path": str(folder)}
    spec = {
        "algorithm": {"ppo": {"miniBatchSize": options.mini_batch, "epochs": options.epochs}},
        "models": {"actor": model, "critic": model, "reward": {"function": {"module": "none"}}},
        "prompts": {"path": "none"},
        "rollout": {"batchSize": options.samples},
        "training": {"microBatchSize": options.micro_batch},
    }
    body = {"apiVersion": "rlhf.dev/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "benchmark"}, "spec": spec}
    return RLHFJob.model_validate(body)


def rank_of(rank: int, world: int, address: str, options: argparse.Namespace) -> tuple[pb.BecomeTraining, torch.device]:
    """Return the role and the device of this process; pin it to its own core if there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    if options.device == "cpu" and len(cores) >= world:
        os.sched_setaffinity(0, {cores[rank]})
    torch.set_num_threads(1)
    device = torch.device("cpu" if options.device == "cpu" else f"cuda:{rank % torch.cuda.device_count()}")
    ranks = tuple(range(options.pipeline))
    count = options.mini_batch // (options.data * options.micro_batch)
    table = serial_table(
        [Pipeline(name=m, model=m, stage_ranks=ranks, microbatches=count) for m in ("actor", "critic")]
    )
    become = pb.BecomeTraining(
        rank=rank, world_size=world, rendezvous=address, group_epoch=1, schedule=table.model_dump_json()
    )
    return become, device


def run_rank(rank: int, world: int, address: str, folder: Path, options: argparse.Namespace) -> None:
    """Run one rank; write its iterations (seconds, phases) to a file."""
    become, device = rank_of(rank, world, address, options)
    phases: dict[str, float] = {}

    def span(name: str, start_ns: int, end_ns: int, **_: str) -> None:
        last = name.rsplit("/", 1)[-1]
        phase = PHASES.get(last, last)
        phases[phase] = phases.get(phase, 0.0) + (end_ns - start_ns) / 1e9

    logging.disable(logging.WARNING)  # synthetic log-probabilities never match
    job = job_of(folder / "model", options)
    trainer = build_trainer(job, become, device, lambda layout: join(become, device, 120.0, layout), span)
    measured = []
    for iteration in range(options.iterations + 1):
        batch = batch_from(samples_of(options, iteration), options.samples, FIELDS)
        phases.clear()
        start, cpu = time.perf_counter(), time.process_time()
        for _ in trainer.train(iteration, batch):
            pass
        seconds = time.perf_counter() - start
        other = seconds - sum(phases.values())
        measured.append({"seconds": seconds, "cpu": time.process_time() - cpu, **phases, "other": other})
    (folder / f"rank-{rank}.json").write_text(json.dumps(measured[1:]))
    os._exit(0)  # without leaving the group properly, because the others may still use it


Measured = list[dict[str, float]]
"""One entry per iteration."""


def forked(options: argparse.Namespace) -> tuple[int, list[Measured]]:
    """Write the model, run every rank in a separate process, and return (parameters, output of each rank)."""
    world = options.pipeline * options.data
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, socket.socket() as listener:
        folder = Path(name)
        parameters = write_model(folder / "model", options)
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        listener.close()
        pids = []
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                run_rank(rank, world, address, folder, options)
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        return parameters, [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(world)]


def main() -> int:
    options = arguments()
    report(options, *forked(options))
    return 0


def report(options: argparse.Namespace, parameters: int, ranks: list[Measured]) -> None:
    """Print medians over iterations of the slowest rank in each."""
    slowest = [max(iteration, key=lambda rank: rank["seconds"]) for iteration in zip(*ranks, strict=True)]
    steps = options.epochs * options.samples // options.mini_batch
    medians = {key: statistics.median(step.get(key, 0.0) for step in slowest) for key in slowest[0]}
    seconds, cpu = medians.pop("seconds"), medians.pop("cpu")
    result: dict[str, Any] = {
        "benchmark": "training",
        "parameters": parameters,
        "pipeline": options.pipeline,
        "data": options.data,
        "samples": options.samples,
        "tokens_per_sample": options.prompt + options.response,
        "seconds_per_iteration": round(seconds, 4),
        "seconds_per_step": round(seconds / steps, 4),
        "cpu_seconds_per_rank": round(cpu, 4),
        "samples_per_second": round(options.samples * options.epochs / seconds, 1),
        "phases": {key: round(value, 4) for key, value in medians.items()},
    }
    for key, value in result.items():
        print(f"{key}: {value}")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    raise SystemExit(main())
