"""The files of an invented run, with any number of workers, samples and iterations.

The trackers themselves write them, with the same numbers every time.
"""

import json
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from tests.support.coordinator.sample_rows import sample_histories, sample_row
from tests.support.jobs.explained_runs import recorded_facts

from rlhf_common import control_pb2 as pb
from rlhf_coordinator.reports.sample_histories import SampleHistories
from rlhf_coordinator.reports.trackers.registry import TRACKERS

BEGAN_NS = 1_795_450_000_000_000_000
ITERATION_NS = 10_000_000_000
HOSTILE = "</script><img src=x onerror=alert(1)><script>alert(2)</script>"
"""Text that a page would execute if it did not escape it."""
WRITTEN = ("metrics.jsonl", "facts.jsonl", "samples", "sample-histories.jsonl", "timeline.json")
STEPS = ("train/actor/F", "train/actor/B", "train/critic/F", "train/critic/B")


def write_run(
    folder: Path, *, iterations: int = 3, samples: int = 24, generation: int = 3, others: int = 3, text: str = HOSTILE
) -> None:
    """Write an unfinished run; `finish_run` ends it. `others`: number of inference workers, and of training ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    job = {"metadata": {"name": text}, "spec": {"algorithm": {"ppo": {}}, "iterations": 9}}
    (folder / "job.json").write_text(json.dumps(job))
    add_iterations(folder, range(iterations), samples=samples, generation=generation, others=others, text=text)


def add_iterations(
    folder: Path, iterations: Iterable[int], *, samples: int = 24, generation: int = 3, others: int = 3, text: str = ""
) -> None:
    """Write more iterations of it."""
    numbers = list(iterations)
    trackers = [TRACKERS[name].open(folder, numbers[0]) for name in WRITTEN]
    for iteration in numbers:
        start = BEGAN_NS + iteration * ITERATION_NS
        row = replace(sample_row(), iteration=iteration, prompt=f"2+3={text}", response=text or "5")
        seconds = {"seconds/iteration": ITERATION_NS / 1e9, "stage/generation": 6.0, "stage/training": 4.0}
        metrics = {"reward": 0.1 * iteration, "kl": 0.5, "tokens_per_second": 900.0, "response_tokens_mean": 22.0}
        for tracker in trackers:
            for span in (*_generation(iteration, start, generation), *_training(iteration, start, others)):
                tracker.span(span)
            tracker.event(start, "worker-lost", f"{text} was lost", {})
            tracker.samples(iteration, [replace(row, sample=number) for number in range(8)])
            tracker.histories(_histories(iteration, start, samples, generation))
            tracker.facts(recorded_facts(iteration=iteration, phases={"Generating": 6.0, "Publishing": 4.0}))
            tracker.iteration(iteration, start + ITERATION_NS, seconds | metrics)
    for tracker in trackers:
        tracker.finish({})


def finish_run(folder: Path) -> None:
    """End the run."""
    (folder / "summary.json").write_text('{"phase": "Complete"}')


def _span(worker: str, name: str, start: int, end: int, iteration: int, **attributes: str) -> pb.Span:
    return pb.Span(worker=worker, name=name, start_ns=start, end_ns=end, iteration=iteration, attributes=attributes)


def _generation(iteration: int, start: int, workers: int) -> Iterable[pb.Span]:
    second = 1_000_000_000
    yield _span("coordinator", "Generating", start, start + 6 * second, iteration)
    yield _span("coordinator", "Training", start + 6 * second, start + 9 * second, iteration)
    for worker in range(workers):
        for stretch in range(12):
            at = start + stretch * second // 2
            yield _span(
                f"generation-{worker}", "decode", at, at + 4 * second // 10, iteration, rows="8.00", tokens="96"
            )


def _training(iteration: int, start: int, ranks: int) -> Iterable[pb.Span]:
    second = 1_000_000_000
    for rank in range(ranks):
        for scored in range(20):
            at = start + (1 + scored // 4) * second + scored * 7_000_000
            yield _span(f"inference-{rank}", "score/reward", at, at + 90_000_000, iteration, samples="4")
        for step in range(2):
            begun = start + 6 * second + step * second
            for place, name in enumerate(STEPS):
                at = begun + (place + rank % 2) * 150_000_000
                attributes = {
                    "predicted_start_ms": f"{place * 140}",
                    "predicted_ms": "130",
                    "stage": "0",
                    "microbatch": "1",
                }
                yield _span(f"training-{rank}", name, at, at + 140_000_000, iteration, **attributes)
            attributes = {"number": str(step), "schedule": "fused", "predicted_ms": "700.000"}
            yield _span(f"training-{rank}", "train/step", begun, begun + 900_000_000, iteration, **attributes)


def _histories(iteration: int, start: int, samples: int, workers: int) -> SampleHistories:
    random_numbers = random.Random(iteration)
    places, finished, scored, responses = [], [], [], []
    for sample in range(samples):
        begun = 0.2 + 3.0 * (sample // max(1, samples // 2))
        ended = begun + random_numbers.uniform(0.5, 2.5)
        place = [(begun, sample % workers)]
        if sample % 10 == 3 and workers > 1:
            place.append(((begun + ended) / 2, (sample + 1) % workers))
        places.append(place)
        finished.append(ended)
        scored.append(ended + random_numbers.uniform(0.05, 0.4))
        responses.append(int(40 * (ended - begun)))
    return sample_histories(
        iteration,
        began_ns=start,
        workers=[f"generation-{number}" for number in range(workers)],
        prompts=[6] * samples,
        responses=responses,
        places=places,
        finished=finished,
        scored=scored,
        versions=[[(iteration, tokens)] for tokens in responses],
        drafted=[sample % 3 * 8 for sample in range(samples)],
        accepted=[sample % 3 * 5 for sample in range(samples)],
        rewards=[random_numbers.random() for _ in range(samples)],
    )
