"""Compares the same training step on all backends and layouts: seconds, memory, publishing, gradients.

    python -m benchmarks.training_backends [--ranks 2] [--microbatches 4] [--rounds 7] [--json]

Builds a random actor and a deeper, narrower critic, and forks the ranks of all layouts. These are one rank of the
backend `torch` (the reference for gradients); `torch` and `megatron` data parallel ranks, pipelines, and ranks that
divide samples by position (`context`); and ranks that divide the optimizer or the models (`shardOptimizer`, `shard`
with `torch`, `tensor` with `megatron`). All groups exist at once and one at a time works, so a slow moment of the
machine affects all of them. Every round goes through all layouts and schedules, forwards and backwards alternately,
after a warm-up round. All train the same mini-batch. The learning rate is so small that rounds hardly differ.

`seconds` is the median step of the slowest rank: mini-batch, gradient reduction, optimizer, gathering. `ratio` is the
median of its ratios to `torch` on data parallel ranks in the same round, `to_serial` to the same layout's serial
schedule. `predicted` is the simulator's time for the mini-batch only, from the shortest stage times measured before
and after the rounds, and `best` the shortest mini-batch. Both are the times of an undisturbed machine (`error`). There
is no prediction for ranks that gather parameters during the step.

Memory is that of the rank with most, in MiB. `held` is counted (weights, gradients, moments, and whole parameters of a
sharded rank). `planned` is `rlhf plan`'s count of the same. `kept` is the memory of a stage from the forward of one
micro-batch to its backward. `peak` is the process's maximum while it loaded, took a serial step and published, without
libraries. `publish` is gathering, and a copy of every parameter that a rank publishes, on all ranks at once.
`gradients` is the largest difference from one rank of `torch`, relative to the largest number of its tensor.
`same_bits` compares schedules.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import tempfile
import time
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
import transformers
from benchmarks.training_ranks import VOCABULARY, WAIT_SECONDS, Layout, Rank, job_of, models_of, serve
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rlhf_common import control_pb2 as pb
from rlhf_common.schedule import ScheduleTable
from rlhf_planner.device_memory import ModelSize, training
from rlhf_planner.schedule.candidate_tables import StageCost, coarse, exact_instance, forecast, search_options, table_of
from rlhf_planner.schedule.methods import FUSED, FUSED_SPLIT, opposite
from rlhf_planner.schedule.report import solution_json
from rlhf_planner.schedule.serial import METHOD as SERIAL
from rlhf_planner.schedule.serial import serial_table
from rlhf_planner.schedule.solve import solve
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
    parser.set_defaults(algorithm="ppo")
    parser.add_argument("--search-seconds", type=float, default=1.0)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    if options.ranks < 2:
        parser.error(f"--ranks {options.ranks} must be at least 2: one rank is compared in any case")
    if options.microbatches < options.ranks or options.microbatches % options.ranks:
        parser.error(f"--microbatches {options.microbatches} must be a multiple of --ranks {options.ranks}")
    return options


def free_addresses(count: int) -> list[str]:
    """Return addresses of so many free ports."""
    with ExitStack() as listening:
        listeners = [listening.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]


def layouts(ranks: int) -> list[Layout]:
    """Return one rank of `torch` first, then `torch` on data parallel ranks, the base of `ratio`."""
    many = [Layout("torch", data=ranks), Layout("torch", data=ranks, shard_optimizer=True)]
    many += [Layout("torch", pipeline=ranks), Layout("torch", context=ranks), Layout("torch", data=ranks, shard=ranks)]
    if find_spec("megatron") is None:
        print("Megatron-core is not installed: its layouts are left out")
    else:
        many += [Layout("megatron", data=ranks), Layout("megatron", pipeline=ranks)]
        many += [Layout("megatron", context=ranks), Layout("megatron", tensor=ranks)]
    return [Layout("torch"), *many]


def write_model(folder: Path, hidden: int, layers: int, seed: int) -> Path:
    """Write a random Llama."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    torch.manual_seed(seed)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def write_models(folder: Path, options: argparse.Namespace) -> None:
    """Write an actor, and a critic whose value head is not zero as in a new one, which would give no gradient."""
    write_model(folder / "actor", options.hidden, options.layers, options.seed)
    write_model(folder / "critic", options.critic_hidden, options.critic_layers, options.seed + 1)
    file = folder / "critic" / "model.safetensors"
    tensors = {name: value for name, value in load_file(file).items() if not name.startswith("lm_head")}
    generator = torch.Generator().manual_seed(options.seed)
    tensors[VALUE_HEAD] = 0.02 * torch.randn(1, options.critic_hidden, generator=generator)
    save_file(tensors, file, {"format": "pt"})


# ---------------------------------------------------------------- schedules


def costs_of(results: list[pb.MeasureResult]) -> tuple[dict[tuple[str, int], StageCost], dict[tuple[int, int], float]]:
    """Return the shortest of all measurements of each step of a stage."""
    times: dict[tuple[str, int], list[StageCost]] = {}
    for result in results:
        for stage in result.stages:
            cost = StageCost(
                stage.forward,
                stage.backward,
                stage.input_gradient,
                stage.weight_gradient,
                float(stage.activation_bytes),
            )
            times.setdefault((stage.model, stage.stage), []).append(cost)
    names = ("forward", "backward", "input_gradient", "weight_gradient", "activation")
    costs = {
        key: StageCost(*(min(getattr(cost, name) for cost in found) for name in names)) for key, found in times.items()
    }
    transfers = {(edge.rank, edge.peer): edge.seconds for result in results for edge in result.transfers}
    return costs, transfers


def tables_for(
    models: Sequence[str], pipeline: int, microbatches: int, search_seconds: float, stages: list[pb.MeasureResult]
) -> list[ScheduleTable]:
    """Return the serial, fused and fused-split tables."""
    costs, transfers = costs_of(stages)
    pipes = opposite(models, pipeline, microbatches)
    tables = [serial_table(pipes)]
    for method in (FUSED, FUSED_SPLIT):
        asked = coarse(exact_instance(pipes, costs, transfers, method == FUSED_SPLIT))
        solution = solve(asked, search_options(method, search_seconds), time.monotonic)
        tables.append(table_of(asked, pipes, solution_json(solution), method))
    return tables


# ---------------------------------------------------------------- groups of ranks


@dataclass
class LayoutRanks:
    """The ranks of a layout, and their measurements."""

    layout: Layout
    folder: Path
    models: tuple[str, ...]
    pids: list[int] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)
    tables: dict[str, ScheduleTable] = field(default_factory=dict)
    """Schedule -> table; the serial one first."""
    stages: list[pb.MeasureResult] = field(default_factory=list)
    before: list[pb.MeasureResult] = field(default_factory=list)
    steps: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    """Schedule -> rounds, each with the times of its slowest rank."""
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
                    os._exit(1)  # without leaving the group properly, because the others may still use it
            theirs.close()
            self.pids.append(pid)
            self.pipes.append(ours)
        self._answers("its ranks to meet")

    def all(self, request: str, *values: Any) -> list[Any]:
        """Send every rank the same request, and return the answers by rank."""
        return self.each(request, [values] * len(self.pipes))

    def each(self, request: str, values: Sequence[Any]) -> list[Any]:
        for pipe, arguments_ in zip(self.pipes, values, strict=True):
            pipe.send((request, arguments_))
        return self._answers(request)

    def _answers(self, request: str) -> list[Any]:
        result = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(WAIT_SECONDS):
                raise TimeoutError(f"waited {WAIT_SECONDS:.0f} s for {request} of rank {rank} of {self.layout.name}")
            try:
                result.append(pipe.recv())
            except EOFError:
                raise SystemExit(f"rank {rank} of {self.layout.name} ended before {request}") from None
        return result

    def kill(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def measured(self) -> list[pb.MeasureResult]:
        """Return stage times; none for ranks that gather, which do not time stages and choose nothing by them."""
        if self.layout.shard > 1:
            return []
        return [pb.MeasureResult.FromString(answer) for answer in self.all("measure")]

    def prepare(self, options: argparse.Namespace) -> None:
        """Warm up, measure the memory, and make the tables as a job does."""
        count = options.microbatches // self.layout.data
        self.tables = {SERIAL: serial_table(opposite(self.models, self.layout.pipeline, count))}
        self.step(SERIAL)
        self.all("publish")
        self.memory = self.all("memory")
        self.stages = self.before = self.measured()
        if self.layout.pipeline > 1:
            tables = tables_for(self.models, self.layout.pipeline, count, options.search_seconds, self.stages)
            self.tables = {table.method: table for table in tables}

    def step(self, method: str) -> dict[str, float]:
        answers: list[dict[str, float]] = self.all("step", self.tables[method].model_dump_json())
        return {name: max(answer[name] for answer in answers) for name in answers[0]}

    def gradients(self, method: str) -> dict[str, torch.Tensor]:
        """Return whole gradients of all parameters, by their names in the folder."""
        paths = [str(self.folder / f"gradients-{rank}") for rank in range(self.layout.world)]
        self.each("gradients", [(self.tables[method].model_dump_json(), path) for path in paths])
        ranks = [torch.load(path) for path in paths]
        if self.layout.shard > 1:
            return {name: torch.cat([part[name] for part in ranks]) for name in ranks[0]}
        return whole_tensors({name: value for part in ranks for name, value in part.items()})


# ---------------------------------------------------------------- figures


def run_rounds(groups: Sequence[LayoutRanks], rounds: int) -> None:
    """Run all layouts and schedules in turn; the first round is a warm-up."""
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
    """Yield the measurements of a layout, one row per schedule."""
    gradients = {method: group.gradients(method) for method in group.tables}
    publishing = statistics.median(publication["seconds"] for publication in group.published)
    for method, table in group.tables.items():
        steps, serial = group.steps[method], group.steps[SERIAL]
        best = min(step["mini_batch"] for step in steps)
        row: dict[str, Any] = {
            "layout": group.layout.name,
            "schedule": method,
            "seconds": round(statistics.median(step["seconds"] for step in steps), 4),
            "ratio": _ratio(steps, base.steps[SERIAL]),
            "to_serial": _ratio(steps, serial),
            "best": round(best, 4),
            "predicted": None,
            "error": None,
            "held": round(max(memory["held"] for memory in group.memory) / MEBIBYTE, 1),
            "planned": round(planned / MEBIBYTE, 1),
            "kept": None,
            "peak": round(max(memory["peak"] for memory in group.memory) / MEBIBYTE, 1),
            "publish": round(publishing, 4),
            "published": round(group.published[0]["bytes"] / MEBIBYTE, 1),
            "gradients": largest_difference(gradients[method], expected),
            "same_bits": all(
                torch.equal(gradients[method][name], gradient) for name, gradient in gradients[SERIAL].items()
            ),
        }
        if group.stages:
            costs, transfers = costs_of(group.stages)
            predicted = forecast(table, costs, transfers)[0]
            row |= {"predicted": round(predicted, 4), "error": round(predicted / best - 1, 4)}
            activation_bytes = max(stage.activation_bytes for measured in group.stages for stage in measured.stages)
            row["kept"] = round(activation_bytes / MEBIBYTE, 1)
        yield row


def _ratio(steps: Sequence[dict[str, float]], others: Sequence[dict[str, float]]) -> float:
    pairs = zip(steps, others, strict=True)
    return round(statistics.median(step["seconds"] / other["seconds"] for step, other in pairs), 3)


def whole_tensors(parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Combine the rows and columns of tensors that ranks of a tensor group have."""
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
    """Return the largest difference, relative to the largest number of its tensor."""
    if ours.keys() != theirs.keys():
        raise SystemExit(f"gradients of other parameters: {sorted(ours.keys() ^ theirs.keys())}")
    return max(
        float((ours[name] - reference).abs().max() / reference.abs().max())
        for name, reference in theirs.items()
        if reference.any()
    )


def planned_bytes(folder: Path, options: argparse.Namespace, layout: Layout) -> int:
    """Return the bytes of a rank's weights, gradients and moments, as `rlhf plan` counts them."""
    sizes = {}
    for model in models_of(options):
        with safe_open(folder / model / "model.safetensors", "pt") as tensors:
            shapes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118
        sizes[model] = ModelSize(sum(int(np.prod(shape)) for shape in shapes), 0)
    return training(job_of(folder, options, layout).spec, sizes).total


def report(options: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    """Print a table, and with --json one object."""
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
        import_module("rlhf_workers.training.megatron.megatron_stage")  # once, before the ranks are forked
    wanted = layouts(options.ranks)
    with tempfile.TemporaryDirectory() as name, ExitStack() as ending:
        folder = Path(name)
        write_models(folder, options)
        addresses = free_addresses(len(wanted))
        groups = [LayoutRanks(layout, folder, models_of(options)) for layout in wanted]
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
