"""Measures seconds of a mini-batch with serial, fused and fused-split schedules, beside the predicted seconds.

    python benchmarks/fused_training.py [--pipeline 2] [--microbatches 2 4 8] [--rounds 5] [--device cuda] [--json]

Builds a random actor and a deeper, narrower critic, and forks one process per rank, pinned to its own core if there
are enough. For each number of micro-batches it does the same as a job: the ranks time their stages and transfers, and
the search makes a fused and a fused-split table. Mini-batches then run with the three tables in turn, `--rounds` times
after a warm-up, so that a slow moment of the machine affects all of them. A mini-batch takes as long as its slowest
rank.

`seconds` is the median round, `best` the shortest. `predicted` uses the shortest stage times measured before and after
the rounds. It is compared with `best` (`error`), because both are the times of an undisturbed machine.
`predicted_by_job` uses the times before the rounds, which are all that a job has when it chooses. `load` is the
machine's load average at the time. If it is above the number of ranks, the machine was not undisturbed.

So on CPUs the same comparison is also made in CPU time of the ranks' threads, which other processes change little.
`cpu_predicted` is the simulator's result for stages timed alone, as a job times them. `cpu_steps` is its result for
the times of the same steps inside the mini-batches of the same rounds. `cpu_error` is the difference. Both are
medians, because the machine's load affects both. CPU time does not include waiting. `cpu_gain` compares `cpu_steps`.
"""

import argparse
import json
import logging
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_common.schedule import ScheduleTable
from rlhf_planner.schedule.candidate_tables import StageCost, coarse, exact_instance, forecast, search_options, table_of
from rlhf_planner.schedule.methods import FUSED, FUSED_SPLIT, METHODS, opposite
from rlhf_planner.schedule.report import solution_json
from rlhf_planner.schedule.serial import serial_table
from rlhf_planner.schedule.solve import solve
from rlhf_workers.training.backends.torch_backend import build_trainer, join
from rlhf_workers.training.schedule.device_timers import HostTimers
from rlhf_workers.training.schedule.executor import TimedAction, execute
from rlhf_workers.training.schedule.step_timing import NoCommunicator, made_up_work, measure, stage_row
from rlhf_workers.training.trainer import Trainer

VOCABULARY = 512
WAIT_SECONDS = 600.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("pipeline", 2), ("micro-batch", 4), ("prompt", 32), ("response", 96), ("hidden", 256), ("layers", 4),
        ("critic-hidden", 192), ("critic-layers", 6), ("rounds", 5), ("seed", 0),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--search-seconds", type=float, default=1.0)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return parser.parse_args()


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


def job_of(folder: Path, options_: argparse.Namespace, microbatches: int, training: Mapping[str, Any]) -> RLHFJob:
    """Return a PPO job for the models in a folder; `training` are the fields of its group besides `microBatchSize`."""
    batch = options_.micro_batch * microbatches
    spec = {
        "algorithm": {"ppo": {"miniBatchSize": batch}},
        "models": {
            "actor": {"path": str(folder / "actor")},
            "critic": {"path": str(folder / "critic")},
            "reward": {"function": {"module": "none"}},
        },
        "prompts": {"path": "none"},
        # Synthetic samples are half as long as the job's maximum.
        "rollout": {
            "batchSize": batch,
            "maxPromptTokens": 2 * options_.prompt,
            "maxResponseTokens": 2 * options_.response,
        },
        "training": {"microBatchSize": options_.micro_batch, **training},
    }
    body = {"apiVersion": "rlhf.dev/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "benchmark"}, "spec": spec}
    return RLHFJob.model_validate(body)


# ---------------------------------------------------------------- ranks


def run_rank(rank: int, address: str, folder: Path, options_: argparse.Namespace) -> None:
    """Run one rank: join the group once, then process each number of micro-batches."""
    if options_.device == "cpu":
        take_core(rank, options_.pipeline)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    device = torch.device("cpu" if options_.device == "cpu" else f"cuda:{rank % torch.cuda.device_count()}")
    parent, peers = os.getppid(), None
    for microbatches in options_.microbatches:
        pipes = opposite(("actor", "critic"), options_.pipeline, microbatches)
        become = pb.BecomeTraining(
            rank=rank,
            world_size=options_.pipeline,
            rendezvous=address,
            group_epoch=1,
            schedule=serial_table(pipes).model_dump_json(),
        )
        job = job_of(folder, options_, microbatches, {"parallelism": {"pipeline": options_.pipeline}})

        def connect(layout: Any, joined: Any = peers, become: pb.BecomeTraining = become) -> Any:
            return joined or join(become, device, WAIT_SECONDS, layout)

        trainer = build_trainer(job, become, device, connect, lambda *_, **__: None)
        peers = trainer.communicator
        before = run_measure(trainer, pb.Measure(measurement_id=1))
        put(folder / f"stages-{microbatches}-{rank}", before.SerializeToString())
        schedules = [json.dumps(table) for table in json.loads(get(folder / f"tables-{microbatches}", parent))]
        timed = run_measure(trainer, pb.Measure(measurement_id=2, schedules=schedules, rounds=options_.rounds))
        timed.stages.extend(run_measure(trainer, pb.Measure(measurement_id=3)).stages)
        put(folder / f"timed-{microbatches}-{rank}", timed.SerializeToString())
        tables = [ScheduleTable.model_validate_json(table) for table in schedules]
        put(folder / f"cpu-{microbatches}-{rank}", json.dumps(cpu_times(trainer, tables, options_.rounds)).encode())
    get(folder / "over", parent)
    os._exit(0)  # without leaving the group properly, because the others may still use it


def take_core(rank: int, ranks: int) -> None:
    """Pin this process to its own core if there are enough for all ranks."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= ranks:
        os.sched_setaffinity(0, {cores[rank]})


def run_measure(trainer: Trainer, command: pb.Measure) -> pb.MeasureResult:
    steps = measure(trainer, command)
    while True:
        try:
            next(steps)
        except StopIteration as finished:
            result: pb.MeasureResult = finished.value
            return result


def cpu_times(trainer: Trainer, tables: list[ScheduleTable], rounds: int) -> list[list[Any]]:
    """Return [place, model, stage, kind, seconds]: CPU time of this thread, by step.

    Place -1 has stages timed alone; other places have the steps inside mini-batches with table `place`.
    """
    work, result, thread_time = made_up_work(trainer), [], HostTimers(time.thread_time_ns)

    def note(place: int, measured: list[TimedAction]) -> None:
        for step in measured:
            act = step.action
            if act.peer is None:
                model = trainer.layout.table.pipelines[act.pipeline].model
                result.append([place, model, act.stage, act.kind, (step.end_ns - step.start_ns) / 1e9])

    for number in range(rounds + 1):
        times = len(result)
        for index, pipeline in enumerate(trainer.layout.table.pipelines):
            for stage in work[index].local_stages:
                for backward in (("B",), ("I", "W")):
                    row = stage_row(index, stage, len(pipeline.stage_ranks), *backward)
                    note(-1, execute(row, work, NoCommunicator(), 0, thread_time))
        for place, table in enumerate(tables):
            layout = trainer.layout.with_table(table)
            trainer.barrier()
            note(place, execute(layout.row, work, trainer.communicator, layout.first_rank, thread_time))
        if number == 0:
            del result[times:]  # the first round is a warm-up
    return result


def put(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    beside = path.with_suffix(".part")
    beside.write_bytes(data)
    beside.rename(path)


def get(path: Path, child_of: int = 0) -> bytes:
    """Wait for a file of another process."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not path.exists():
        if child_of and os.getppid() != child_of:  # the process that started this one has died
            os._exit(1)
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {WAIT_SECONDS:.0f} s for {path.name}")
        time.sleep(0.01)
    return path.read_bytes()


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


def cpu_costs(found: list[list[Any]], place: int) -> dict[tuple[str, int], StageCost]:
    """Return the median CPU seconds of every step of a stage at a place of `cpu_times`."""
    times: dict[tuple[str, int], dict[str, list[float]]] = {}
    for at, model, stage, kind, seconds in found:
        if at == place:
            times.setdefault((model, stage), {}).setdefault(kind, []).append(seconds)
    # A table has whole or split backward steps; times of the other kind are not used.
    costs = {}
    for key, kinds in times.items():
        whole, back, input_part, weight_part = (statistics.median(kinds.get(kind, [1.0])) for kind in "FBIW")
        costs[key] = StageCost(whole, back, input_part, weight_part, 0.0)
    return costs


def tables_for(options_: argparse.Namespace, microbatches: int, stages: list[pb.MeasureResult]) -> list[ScheduleTable]:
    """Return the serial, fused and fused-split tables."""
    costs, transfers = costs_of(stages)
    pipes = opposite(("actor", "critic"), options_.pipeline, microbatches)
    tables = [serial_table(pipes)]
    for method in (FUSED, FUSED_SPLIT):
        asked = coarse(exact_instance(pipes, costs, transfers, method == FUSED_SPLIT))
        solution = solve(asked, search_options(method, options_.search_seconds), time.monotonic)
        tables.append(table_of(asked, pipes, solution_json(solution), method))
    return tables


def compare(folder: Path, options_: argparse.Namespace, microbatches: int) -> dict[str, Any]:
    """Return predicted and measured times of each schedule for one number of micro-batches."""
    ranks = range(options_.pipeline)
    stages = [pb.MeasureResult.FromString(get(folder / f"stages-{microbatches}-{rank}")) for rank in ranks]
    tables = tables_for(options_, microbatches, stages)
    put(folder / f"tables-{microbatches}", json.dumps([table.model_dump(mode="json") for table in tables]).encode())
    timed = [pb.MeasureResult.FromString(get(folder / f"timed-{microbatches}-{rank}")) for rank in ranks]
    before, fresh = costs_of(stages), costs_of([*stages, *timed])
    cpu = [figures for rank in ranks for figures in json.loads(get(folder / f"cpu-{microbatches}-{rank}"))]
    schedules: dict[str, dict[str, Any]] = {}
    for place, (method, table) in enumerate(zip(METHODS, tables, strict=True)):
        rounds = [max(item) for item in zip(*(result.tables[place].seconds for result in timed), strict=True)]
        by_job, predicted = (forecast(table, *measured)[0] for measured in (before, (fresh[0], before[1])))
        schedules[method] = {
            "seconds": round(statistics.median(rounds), 4),
            "best": round(min(rounds), 4),
            "worst": round(max(rounds), 4),
            "predicted_by_job": round(by_job, 4),
            "predicted": round(predicted, 4),
            "error": round(predicted / min(rounds) - 1, 4),
        }
        alone, inside = (forecast(table, cpu_costs(cpu, at), before[1])[0] for at in (-1, place))
        schedules[method] |= {
            "cpu_predicted": round(alone, 4), "cpu_steps": round(inside, 4), "cpu_error": round(alone / inside - 1, 4)
        }  # fmt: skip
    serial = schedules[METHODS[0]]
    for schedule in schedules.values():
        for gain, key in (
            ("gain", "seconds"),
            ("best_gain", "best"),
            ("predicted_gain", "predicted"),
            ("cpu_gain", "cpu_steps"),
        ):
            schedule[gain] = round(serial[key] / schedule[key] - 1, 4)
    shortest = min(min(cost.forward, cost.backward) for cost in fresh[0].values())
    return {
        "microbatches": microbatches,
        "load": round(os.getloadavg()[0], 1),
        "shortest_step_seconds": round(shortest, 4),
        "stage_seconds": {
            f"{model}-{stage}": {
                "F": round(cost.forward, 4), "B": round(cost.backward, 4),
                "I": round(cost.input_gradient, 4), "W": round(cost.weight_gradient, 4),
            }
            for (model, stage), cost in sorted(fresh[0].items())
        },
        "schedules": schedules,
    }  # fmt: skip


def main() -> int:
    options_ = arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, socket.socket() as listener:
        folder = Path(name)
        write_model(folder / "actor", options_.hidden, options_.layers, options_.seed)
        write_model(folder / "critic", options_.critic_hidden, options_.critic_layers, options_.seed + 1)
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        listener.close()
        pids = []
        for rank in range(options_.pipeline):
            pid = os.fork()
            if pid == 0:
                try:
                    run_rank(rank, address, folder, options_)
                finally:
                    os._exit(1)
            pids.append(pid)
        result = [compare(folder, options_, microbatches) for microbatches in options_.microbatches]
        put(folder / "over", b"")
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        print(f"ranks ended with {codes}", file=sys.stderr)
        return 1
    report(options_, result)
    return 0


def report(options_: argparse.Namespace, found: list[dict[str, Any]]) -> None:
    """Print a table for people, or one object for programs."""
    columns = ("seconds", "best", "predicted", "error", "gain", "cpu_predicted", "cpu_steps", "cpu_error", "cpu_gain")
    print(f"{'micro-batches':>13} {'schedule':<12} " + " ".join(f"{name:>14}" for name in columns))
    for comparison in found:
        for method, row in comparison["schedules"].items():
            numbers = " ".join(f"{row[name]:>14.4f}" for name in columns)
            print(f"{comparison['microbatches']:>13} {method:<12} {numbers}")
    errors, cpu_errors = (
        [abs(row[name]) for result in found for row in result["schedules"].values()] for name in ("error", "cpu_error")
    )
    if options_.json:
        result = {
            "benchmark": "fused_training",
            "device": options_.device,
            "cores": os.cpu_count(),
            "pipeline": options_.pipeline,
            "rounds": options_.rounds,
            "median_error": round(statistics.median(errors), 4),
            "largest_error": round(max(errors), 4),
            "median_cpu_error": round(statistics.median(cpu_errors), 4),
            "largest_cpu_error": round(max(cpu_errors), 4),
            "results": found,
        }
        print(json.dumps(result))


if __name__ == "__main__":
    raise SystemExit(main())
