"""The same training step by every backend and layout that this version has: seconds, memory, publishing, gradients.

    python -m benchmarks.training_backends [--ranks 2] [--microbatches 4] [--rounds 7] [--json]

Builds a random actor and a deeper, narrower critic, and forks the ranks of all layouts: one rank of the backend `torch`
(what gradients are compared with), of `torch` and `megatron` data parallel ranks, pipelines and ranks that share
samples by position (`context`), and ranks that hold the models in parts (`shard` by `torch`, `tensor` by `megatron`).
All groups live at once and one at a time works, so a slow moment of the machine falls on all alike: every round goes
through all layouts and schedules, forwards and backwards in turn, after one that warms up. All of them train the same
mini-batch; the learning rate is so small that no weight changes, so every round is the same.

`seconds` is the median of a step of the slowest rank: mini-batch, sums of gradients, optimizer, gathering. `ratio` is
the median of its ratios to `torch` on data parallel ranks in the same round, `to_serial` to the same layout's serial
schedule. `predicted` is what the simulator says of the mini-batch alone, from the shortest stage times measured before
and after the rounds, and `best` the shortest mini-batch: both are what an undisturbed machine would take (`error`).
Nothing predicts ranks that gather parameters as they go. Memory is of the rank with most, in MiB: `held` is counted
(weights, gradients, moments, and what a sharded rank keeps whole), `planned` is what `rlhf plan` counts for the same,
`kept` is what the forward of one micro-batch keeps of a stage for its backward, `peak` is what the process grew to
while it loaded, took a serial step and published, libraries left out. `publish` is gathering, and a copy of every
parameter that a rank publishes, on all ranks at once. `gradients` is the largest difference from one rank of `torch`,
relative to the largest number of its tensor; `same_bits` compares schedules.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.fused_training import costs_of, tables_for, write_model
from benchmarks.training_ranks import MODELS, WAIT_SECONDS, Layout, Rank, job_of, serve
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rlhf_common import control_pb2 as pb
from rlhf_common.schedule import ScheduleTable
from rlhf_planner.device_memory import ModelSize, training
from rlhf_planner.schedule.candidate_tables import forecast
from rlhf_planner.schedule.methods import opposite
from rlhf_planner.schedule.serial import METHOD as SERIAL
from rlhf_planner.schedule.serial import serial_table
from rlhf_workers.training.parallel.tensor_parts import ENDINGS
from rlhf_workers.training.stages.pipeline_stage import VALUE_HEAD

MEBIBYTE = 2**20


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("ranks", 2), ("microbatches", 4), ("micro-batch", 4), ("prompt", 32), ("response", 96), ("hidden", 256),
        ("layers", 4), ("critic-hidden", 192), ("critic-layers", 6), ("rounds", 7), ("seed", 0),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--search-seconds", type=float, default=1.0)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    if options.ranks < 2:
        parser.error(f"--ranks {options.ranks} must be at least 2: one rank is compared in any case")
    if options.microbatches < options.ranks or options.microbatches % options.ranks:
        parser.error(f"--microbatches {options.microbatches} must be a multiple of --ranks {options.ranks}")
    return options


def layouts(ranks: int) -> list[Layout]:
    """One rank of `torch` first, then `torch` on data parallel ranks, with which all others are compared."""
    many = [Layout("torch", data=ranks), Layout("torch", data=ranks, shard_optimizer=True)]
    many += [Layout("torch", pipeline=ranks), Layout("torch", context=ranks), Layout("torch", data=ranks, shard=ranks)]
    if find_spec("megatron") is None:
        print("Megatron-core is not installed: its layouts are left out")
    else:
        many += [Layout("megatron", data=ranks), Layout("megatron", pipeline=ranks)]
        many += [Layout("megatron", context=ranks), Layout("megatron", tensor=ranks)]
    return [Layout("torch"), *many]


def write_models(folder: Path, options: argparse.Namespace) -> None:
    """An actor, and a critic whose value head is not the zeros of a new one, from which no gradient would come."""
    write_model(folder / "actor", options.hidden, options.layers, options.seed)
    write_model(folder / "critic", options.critic_hidden, options.critic_layers, options.seed + 1)
    file = folder / "critic" / "model.safetensors"
    tensors = {name: value for name, value in load_file(file).items() if not name.startswith("lm_head")}
    generator = torch.Generator().manual_seed(options.seed)
    tensors[VALUE_HEAD] = 0.02 * torch.randn(1, options.critic_hidden, generator=generator)
    save_file(tensors, file, {"format": "pt"})


# ---------------------------------------------------------------- groups of ranks


@dataclass
class LayoutRanks:
    """The ranks of a layout, and what was measured of them."""

    layout: Layout
    folder: Path
    pids: list[int] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)
    tables: dict[str, ScheduleTable] = field(default_factory=dict)
    """Schedule -> table; the serial one first."""
    stages: list[pb.MeasureResult] = field(default_factory=list)
    before: list[pb.MeasureResult] = field(default_factory=list)
    steps: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    """Schedule -> rounds, each of its slowest rank."""
    published: list[dict[str, float]] = field(default_factory=list)
    memory: list[dict[str, int]] = field(default_factory=list)

    def start(self, options: argparse.Namespace, address: str) -> None:
        parent = os.getpid()
        for rank in range(self.layout.world):
            ours, theirs = Pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    serve(theirs, parent, Rank(self.folder, options, self.layout, rank, address))
                except Exception:
                    traceback.print_exc()
                finally:
                    os._exit(1)  # without taking the group down politely: the others may still be in it
            theirs.close()
            self.pids.append(pid)
            self.pipes.append(ours)
        self._answers("its ranks to meet")

    def all(self, what: str, *given: Any) -> list[Any]:
        """Ask every rank for the same, and return the answers by rank."""
        return self.each(what, [given] * len(self.pipes))

    def each(self, what: str, given: Sequence[Any]) -> list[Any]:
        for pipe, arguments_ in zip(self.pipes, given, strict=True):
            pipe.send((what, arguments_))
        return self._answers(what)

    def _answers(self, what: str) -> list[Any]:
        result = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(WAIT_SECONDS):
                raise TimeoutError(f"waited {WAIT_SECONDS:.0f} s for {what} of rank {rank} of {self.layout.name}")
            try:
                result.append(pipe.recv())
            except EOFError:
                raise SystemExit(f"rank {rank} of {self.layout.name} ended before {what}") from None
        return result

    def kill(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def measured(self) -> list[pb.MeasureResult]:
        """Stage times; none where nothing is chosen by them, as ranks that gather do not time a stage in step."""
        if self.layout.shard > 1:
            return []
        return [pb.MeasureResult.FromString(answer) for answer in self.all("measure")]

    def prepare(self, options: argparse.Namespace) -> None:
        """Warm up, look at the memory, and make the tables as a job does."""
        count = options.microbatches // self.layout.data
        self.tables = {SERIAL: serial_table(opposite(MODELS, self.layout.pipeline, count))}
        self.step(SERIAL)
        self.all("publish")
        self.memory = self.all("memory")
        self.stages = self.before = self.measured()
        if self.layout.pipeline > 1:
            asked = argparse.Namespace(pipeline=self.layout.pipeline, search_seconds=options.search_seconds)
            self.tables = {table.method: table for table in tables_for(asked, count, self.stages)}

    def step(self, method: str) -> dict[str, float]:
        answers: list[dict[str, float]] = self.all("step", self.tables[method].model_dump_json())
        return {name: max(answer[name] for answer in answers) for name in answers[0]}

    def gradients(self, method: str) -> dict[str, torch.Tensor]:
        """Whole gradients of all parameters, by their names in the folder."""
        paths = [str(self.folder / f"gradients-{rank}") for rank in range(self.layout.world)]
        self.each("gradients", [(self.tables[method].model_dump_json(), path) for path in paths])
        ranks = [torch.load(path) for path in paths]
        if self.layout.shard > 1:
            return {name: torch.cat([one[name] for one in ranks]) for name in ranks[0]}
        return whole_tensors({name: value for one in ranks for name, value in one.items()})


# ---------------------------------------------------------------- figures


def run_rounds(groups: Sequence[LayoutRanks], rounds: int) -> None:
    """Go through all layouts and schedules in turn; the first round warms up."""
    turns = [(group, method) for group in groups for method in group.tables]
    for number in range(rounds + 1):
        for group, method in turns if number % 2 else turns[::-1]:
            taken = group.step(method)
            if number:
                group.steps.setdefault(method, []).append(taken)
            if number and method == SERIAL:
                answers = group.all("publish")
                seconds = taken["gather"] + max(answer["seconds"] for answer in answers)
                group.published.append({"seconds": seconds, "bytes": max(answer["bytes"] for answer in answers)})
    for group in groups:
        group.stages = [*group.before, *group.measured()]


def rows_of(
    group: LayoutRanks, base: LayoutRanks, expected: dict[str, torch.Tensor], planned: int
) -> Iterator[dict[str, Any]]:
    """What was measured of a layout, a row for each schedule."""
    gradients = {method: group.gradients(method) for method in group.tables}
    publishing = statistics.median(one["seconds"] for one in group.published)
    for method, table in group.tables.items():
        steps, serial = group.steps[method], group.steps[SERIAL]
        best = min(one["mini_batch"] for one in steps)
        row: dict[str, Any] = {
            "layout": group.layout.name,
            "schedule": method,
            "seconds": round(statistics.median(one["seconds"] for one in steps), 4),
            "ratio": _ratio(steps, base.steps[SERIAL]),
            "to_serial": _ratio(steps, serial),
            "best": round(best, 4),
            "predicted": None,
            "error": None,
            "held": round(max(one["held"] for one in group.memory) / MEBIBYTE, 1),
            "planned": round(planned / MEBIBYTE, 1),
            "kept": None,
            "peak": round(max(one["peak"] for one in group.memory) / MEBIBYTE, 1),
            "publish": round(publishing, 4),
            "published": round(group.published[0]["bytes"] / MEBIBYTE, 1),
            "gradients": largest_difference(gradients[method], expected),
            "same_bits": all(torch.equal(gradients[method][name], one) for name, one in gradients[SERIAL].items()),
        }
        if group.stages:
            costs, transfers = costs_of(group.stages)
            predicted = forecast(table, costs, transfers)[0]
            row |= {"predicted": round(predicted, 4), "error": round(predicted / best - 1, 4)}
            kept = max(stage.activation_bytes for measured in group.stages for stage in measured.stages)
            row["kept"] = round(kept / MEBIBYTE, 1)
        yield row


def _ratio(steps: Sequence[dict[str, float]], others: Sequence[dict[str, float]]) -> float:
    pairs = zip(steps, others, strict=True)
    return round(statistics.median(one["seconds"] / other["seconds"] for one, other in pairs), 3)


def whole_tensors(parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Put rows and columns together that ranks of a tensor group have."""
    whole: dict[str, torch.Tensor] = {}
    split: dict[tuple[str, int], dict[int, torch.Tensor]] = {}
    for written, value in parts.items():
        dimension = next((place for place, ending in enumerate(ENDINGS) if ending in written), None)
        if dimension is None:
            whole[written] = value
            continue
        name, _, rows = written.partition(ENDINGS[dimension])
        split.setdefault((name, dimension), {})[int(rows.split("-")[0])] = value
    for (name, dimension), found in split.items():
        whole[name] = torch.cat([found[first] for first in sorted(found)], dim=dimension)
    return whole


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Relative to the largest number of a tensor."""
    if ours.keys() != theirs.keys():
        raise SystemExit(f"gradients of other parameters: {sorted(ours.keys() ^ theirs.keys())}")
    return max(float((ours[name] - one).abs().max() / one.abs().max()) for name, one in theirs.items() if one.any())


def planned_bytes(folder: Path, options: argparse.Namespace, layout: Layout) -> int:
    """Weights, gradients and moments of a rank, as `rlhf plan` counts them."""
    sizes = {}
    for model in MODELS:
        with safe_open(folder / model / "model.safetensors", "pt") as tensors:
            shapes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118
        sizes[model] = ModelSize(sum(int(np.prod(shape)) for shape in shapes), 0)
    return training(job_of(folder, options, layout).spec, sizes).total


def report(options: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    """A table for people, one object for programs."""
    print(f"{'layout':<20} {'schedule':<12} " + " ".join(f"{name:>9}" for name in list(rows[0])[2:]))
    for row in rows:
        cells = [f"{value:.2g}" if name == "gradients" else f"{value}" for name, value in list(row.items())[2:]]
        print(f"{row['layout']:<20} {row['schedule']:<12} " + " ".join(f"{cell:>9}" for cell in cells))
    if options.json:
        asked = {name: value for name, value in vars(options).items() if name != "json"}
        machine = {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
        print(json.dumps({"benchmark": "training_backends", **machine, **asked, "results": rows}))


def main() -> int:
    options = arguments()
    torch.set_num_threads(1)
    if find_spec("megatron") is not None:
        import_module("rlhf_workers.training.megatron.megatron_stage")  # once, before ranks are forked
    wanted = layouts(options.ranks)
    with tempfile.TemporaryDirectory() as name, ExitStack() as ending:
        folder = Path(name)
        write_models(folder, options)
        with ExitStack() as listening:
            listeners = [listening.enter_context(socket.socket()) for _ in wanted]
            for listener in listeners:
                listener.bind(("127.0.0.1", 0))
            addresses = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
        groups = [LayoutRanks(layout, folder) for layout in wanted]
        for group, address in zip(groups, addresses, strict=True):
            ending.callback(group.kill)
            group.start(options, address)
        for group in groups:
            group.prepare(options)
        run_rounds(groups, options.rounds)
        expected = groups[0].gradients(SERIAL)
        rows = [
            row
            for group in groups
            for row in rows_of(group, groups[1], expected, planned_bytes(folder, options, group.layout))
        ]
    report(options, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
