"""Seconds of a training iteration with the engine's old log-probabilities and with the trainer's, in turns in one run.

    python benchmarks/old_log_probabilities.py [--pipeline 2] [--data 1] [--samples 64] [--epochs 1] [--json]

Ranks, models and samples are those of benchmarks/training.py: an actor and a critic. Each iteration is trained by both
forms, the first of them changing from one to the next. Printed are medians of the slowest rank, `added` the share that
the pass over the batch adds to an iteration, `pass_seconds` what its spans say it takes. It is one forward of the actor
an iteration, so it adds the less the more epochs there are.
"""

import argparse
import json
import logging
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.training import FIELDS, arguments, forked, job_of, rank_of, samples_of

from rlhf_workers.training.backends.torch_backend import build_trainer, join
from rlhf_workers.training.batches.training_batch import batch_from
from rlhf_workers.training.communication.communicator import Communicator
from rlhf_workers.training.old_log_probabilities import SPAN
from rlhf_workers.training.parallel.rank_layout import RankLayout

FORMS = ("Engine", "Trainer")


def run_rank(rank: int, world: int, address: str, folder: Path, options: argparse.Namespace) -> None:
    """One rank; writes what its iterations took to a file."""
    become, device = rank_of(rank, world, address, options)
    logging.disable(logging.WARNING)  # made-up log-probabilities never match
    joined: list[Communicator] = []
    passes: list[float] = []

    def connect(layout: RankLayout) -> Communicator:
        if not joined:
            joined.append(join(become, device, 120.0, layout))
        return joined[0]

    def span(name: str, start_ns: int, end_ns: int, **_: str) -> None:
        if name == SPAN:
            passes.append((end_ns - start_ns) / 1e9)

    job = partial(job_of, folder / "model", options)
    trainers = {form: build_trainer(job(oldLogProbabilities=form), become, device, connect, span) for form in FORMS}
    measured = []
    for iteration in range(options.iterations + 1):
        batch = batch_from(samples_of(options, iteration), options.samples, FIELDS)
        took = {}
        passes.clear()
        for form in FORMS if iteration % 2 else reversed(FORMS):
            trainers[form].barrier()
            start, cpu = time.perf_counter(), time.process_time()
            for _ in trainers[form].train(iteration, batch):
                pass
            took[form] = time.perf_counter() - start
            took[f"{form}-cpu"] = time.process_time() - cpu
        measured.append({**took, "pass": sum(passes)})
    (folder / f"rank-{rank}.json").write_text(json.dumps(measured[1:]))
    os._exit(0)  # without taking the group down politely: the others may still be in it


def main() -> int:
    options = arguments(__doc__)
    parameters, ranks = forked(options, run_rank)

    def median(name: str) -> float:
        slowest: list[float] = [max(rank[name] for rank in line) for line in zip(*ranks, strict=True)]
        return statistics.median(slowest)

    engine, trainer = (median(form) for form in FORMS)
    engine_cpu, trainer_cpu = (median(f"{form}-cpu") for form in FORMS)
    result: dict[str, Any] = {
        "benchmark": "old_log_probabilities",
        "parameters": parameters,
        "pipeline": options.pipeline,
        "data": options.data,
        "samples": options.samples,
        "epochs": options.epochs,
        "tokens_per_sample": options.prompt + options.response,
        "engine_seconds": round(engine, 4),
        "trainer_seconds": round(trainer, 4),
        "added": round(trainer / engine - 1, 3),
        "added_cpu": round(trainer_cpu / engine_cpu - 1, 3),
        "pass_seconds": round(median("pass"), 4),
        "load": round(os.getloadavg()[0], 1),
    }
    for key, value in result.items():
        print(f"{key}: {value}")
    if options.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
