"""Training steps of padded micro-batches, by samples and by bounded tokens, and of packed ones, on long-tailed lengths.

    python -m benchmarks.micro_batch_tokens [--samples 64] [--micro-batch 1 2 4 8] [--longest 512] [--json]

Builds a random actor and critic and one mini-batch whose lengths are log-normal, and trains it by one rank of the
backend `torch` under each setting: `microBatchSize` of each number, and beside each `microBatchTokens` of the largest
micro-batch that this had (with `microBatchSize` of the whole mini-batch), which so needs the same memory, padded and
with `packing`. One process and one thread; every round goes through all settings, forwards and backwards in turn, after
one that warms up. The learning rate is so small that no weight changes, so every round is the same work.

`seconds` is the median of a step with advantages and optimizer. Of the same round: `ratio` is the median of what the
bound of samples took against the bound of tokens, `packed_ratio` of what it took against the packed one, and
`packed_ratio_of_tokens` of the bound of tokens against the packed one: above 1 the latter is faster. `best_ratio` is
the fastest padded setting's median against the fastest packed one's. `padding` is the share of computed tokens that is
padding, `largest` the tokens of the largest micro-batch, `gradients` the largest difference between the settings'
gradient norms, relative.
"""

import argparse
import json
import logging
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from benchmarks import fused_training
from benchmarks.training import FIELDS, sample_of
from benchmarks.training_ranks import MODELS, STILL

from rlhf_api import control_pb2 as pb
from rlhf_planner.schedule.methods import opposite
from rlhf_planner.schedule.serial import serial_table
from rlhf_workers.training.backends import torch_backend
from rlhf_workers.training.batches.training_batch import TrainingBatch, batch_from
from rlhf_workers.training.communication.communicator import Communicator
from rlhf_workers.training.parallel.rank_layout import RankLayout
from rlhf_workers.training.trainer import Trainer

SPREAD: Final = 1.0
"""Standard deviation of the logarithm of lengths: the longest of a few dozen is about eight medians."""
CPU: Final = torch.device("cpu")
WAIT_SECONDS: Final = 60.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("samples", 64), ("prompt", 16), ("median", 64), ("longest", 512), ("hidden", 128), ("layers", 4),
        ("rounds", 5), ("seed", 0),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--micro-batch", type=int, nargs="+", default=[1, 2, 4, 8], metavar="SAMPLES")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    if refused := [size for size in options.micro_batch if size < 1 or options.samples % size]:
        parser.error(f"--micro-batch {refused[0]} must divide --samples {options.samples}")
    return options


def batch_of(options: argparse.Namespace) -> TrainingBatch:
    """Random samples, most of them short."""
    rng = np.random.default_rng(options.seed)
    lengths = rng.lognormal(np.log(options.median), SPREAD, options.samples).clip(1, options.longest).astype(int)
    samples = [sample_of(rng, index, options.prompt, int(length)) for index, length in enumerate(lengths)]
    return batch_from(samples, len(samples), FIELDS)


class BoundedTrainer:
    """A trainer of one bound, and what its steps took."""

    def __init__(
        self,
        folder: Path,
        options: argparse.Namespace,
        alone: Communicator,
        size: int,
        tokens: int | None = None,
        packing: bool = False,
    ) -> None:
        self.size, self.tokens, self.seconds, self.metrics = size, tokens, list[float](), dict[str, float]()
        optimizer = {"learningRate": STILL, "criticLearningRate": STILL, "weightDecay": 0.0}
        training = {"optimizer": optimizer, "microBatchTokens": tokens, "packing": packing}
        shape = argparse.Namespace(prompt=options.prompt, response=options.longest, micro_batch=size)
        count = options.samples // size
        become = pb.BecomeTraining(
            rank=0, world_size=1, group_epoch=1, schedule=serial_table(opposite(MODELS, 1, count)).model_dump_json()
        )
        self.trainer: Trainer = torch_backend.build_trainer(
            fused_training.job_of(folder, shape, count, training), become, CPU, lambda _: alone, lambda *_, **__: None
        )
        self._remembered = self.trainer.algorithm.state()

    def step(self, batch: TrainingBatch) -> None:
        """Take one training step, as the first one of the job."""
        self.trainer.algorithm.restore(self._remembered)  # else the KL coefficient moves on
        begun = time.perf_counter()
        training = self.trainer.train(0, batch)
        try:
            while True:
                next(training)
        except StopIteration as ended:
            self.metrics = ended.value
        self.seconds.append(time.perf_counter() - begun)

    def row(self) -> dict[str, Any]:
        """Return what it was, and took."""
        return {
            "micro_batch_size": self.size,
            "micro_batch_tokens": self.tokens,
            "micro_batches": self.metrics["train/micro_batches"],
            "largest": int(self.metrics["train/largest_micro_batch_tokens"]),
            "padding": round(self.metrics["train/padding"], 3),
            "seconds": round(statistics.median(self.seconds[1:]), 4),
        }


def measured(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each bound of samples, with those of the bound of tokens that holds as much."""
    fused_training.write_model(folder / "actor", options.hidden, options.layers, options.seed)
    fused_training.write_model(folder / "critic", options.hidden, options.layers, options.seed + 1)
    alone, batch = meet(), batch_of(options)
    alike = []
    for size in options.micro_batch:
        samples = BoundedTrainer(folder, options, alone, size)
        samples.step(batch)
        largest = int(samples.metrics["train/largest_micro_batch_tokens"])
        tokens, packed = (
            BoundedTrainer(folder, options, alone, options.samples, largest, packing) for packing in (False, True)
        )
        tokens.step(batch)
        packed.step(batch)
        alike.append((samples, tokens, packed))
    order = [setting for settings in alike for setting in settings]
    for number in range(options.rounds):
        for setting in order if number % 2 else reversed(order):
            setting.step(batch)
    return [row_of(*settings) for settings in alike]


def row_of(samples: BoundedTrainer, tokens: BoundedTrainer, packed: BoundedTrainer) -> dict[str, Any]:
    """Return what three settings that need the same memory took against each other."""
    norms = [[one.metrics[f"gradient_norm/{model}"] for model in MODELS] for one in (samples, tokens, packed)]
    apart = [abs(norm / first - 1) for of in norms for norm, first in zip(of, norms[0], strict=True)]
    return {
        "samples": samples.row(),
        "tokens": tokens.row(),
        "packed": packed.row(),
        "ratio": faster(samples, tokens),
        "packed_ratio": faster(samples, packed),
        "packed_ratio_of_tokens": faster(tokens, packed),
        "gradients": max(apart),
    }


def faster(one: BoundedTrainer, other: BoundedTrainer) -> float:
    """Return what one took against another in the same round, in the median."""
    ratios = [slow / fast for slow, fast in zip(one.seconds[1:], other.seconds[1:], strict=True)]
    return round(statistics.median(ratios), 3)


def best_ratio(rows: list[dict[str, Any]]) -> float:
    """Return the seconds of the fastest padded setting against those of the fastest packed one."""
    padded: float = min(row[of]["seconds"] for row in rows for of in ("samples", "tokens"))
    packed: float = min(row["packed"]["seconds"] for row in rows)
    return round(padded / packed, 3)


def meet() -> Communicator:
    """Return a group of this process alone."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    table = serial_table(opposite(MODELS, 1, 1))
    become = pb.BecomeTraining(
        rank=0, world_size=1, rendezvous=address, group_epoch=1, schedule=table.model_dump_json()
    )
    return torch_backend.join(become, CPU, WAIT_SECONDS, RankLayout(table, 0, 1))


def main() -> int:
    options = arguments()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # made-up log-probabilities never match
    with tempfile.TemporaryDirectory() as name:
        rows = measured(Path(name), options)
    kinds = ("samples", "tokens", "packed")
    print(f"{'samples':>8} {'largest':>8} {'padding':>20} {'micro-batches':>20} {'seconds':>23} {'packed against':>15}")
    for row in rows:
        of = [row[kind] for kind in kinds]
        print(
            f"{of[0]['micro_batch_size']:>8} {of[0]['largest']:>8}"
            + "".join(f" {one['padding']:>6.2f}" for one in of)
            + "".join(f" {one['micro_batches']:>6.0f}" for one in of)
            + "".join(f" {one['seconds']:>7.3f}" for one in of)
            + f" {row['packed_ratio']:>7.2f} {row['packed_ratio_of_tokens']:>7.2f}"
        )
    print(f"the best padded against the best packed: {best_ratio(rows):.2f}")
    if options.json:
        settings = {key: value for key, value in vars(options).items() if key != "json"}
        print(
            json.dumps(
                {
                    "benchmark": "micro_batch_tokens",
                    "settings": settings,
                    "results": rows,
                    "best_ratio": best_ratio(rows),
                }
            )
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
