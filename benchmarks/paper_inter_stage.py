"""Inter-stage fusion at the size of RLHFuse's evaluation, in simulation: LLaMA 13B, 33B, 65B on 256 Hopper-class GPUs.

No GPU is used. Costs are a roofline (`rlhf_planner.inter_stage.roofline`, where the hardware figures are); response
lengths are log-normal with P99 = SKEW x median at the output limit, cut there. Reference has the actor's size, reward
the critic's; a worker is one node of 8 GPUs. The plan is chosen on lengths of earlier iterations and judged on others.
Serial is: all samples generated, then all nodes score. `--json` prints one object as the last line; `--picture FILE`
draws time against R_t, `--timeline FILE` one iteration of eight nodes before and after (SVG or PNG by the name), and
nothing is measured then.
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_planner.inter_stage.choose import choose
from rlhf_planner.inter_stage.costs import StageCosts
from rlhf_planner.inter_stage.forecast import IterationSetup
from rlhf_planner.inter_stage.forecast_figures import ThresholdCurve, draw_curves, draw_forecasts
from rlhf_planner.inter_stage.lengths import LengthModel
from rlhf_planner.inter_stage.roofline import HOPPER, ModelShape, assumed_costs
from rlhf_planner.inter_stage.simulate import simulate

MIB = 2**20
MODELS = {  # LLaMA: parameters, layers, KV bytes a token in 16 bit (multi-head attention: no sharing of keys)
    "13B": ModelShape(13.0e9, 40, 0.78 * MIB),
    "33B": ModelShape(32.5e9, 60, 1.52 * MIB),
    "65B": ModelShape(65.2e9, 80, 2.5 * MIB),
}
PAIRS = (("13B", "33B"), ("33B", "13B"), ("33B", "65B"), ("65B", "33B"))
LIMITS = (512, 1024, 2048)
GPUS, NODE, BATCH = 256, 8, 512
SKEW = 8.0
P99 = 2.3263  # standard deviations of a normal distribution to its 99th percentile
JUDGED = 8  # iterations that a plan is judged on
EFFICIENCY = (0.5, 0.25, 0.1, 0.05)  # of the peak in scoring: the first is the default, the others how much it matters
POOLS, SHARES = (2, 4, 8, 16), (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8)  # of the sweep with a fixed pool
PAPER = {"generationAndInferenceSpeedup": [1.2, 1.6], "bestThresholdShare": 0.2}


@dataclass(frozen=True)
class PaperCase:
    """One actor, critic and output limit."""

    actor: str
    critic: str
    limit: int
    efficiency: float = EFFICIENCY[0]

    def costs(self) -> StageCosts:
        actor, critic = MODELS[self.actor], MODELS[self.critic]
        device = replace(HOPPER, flops=HOPPER.flops * self.efficiency / EFFICIENCY[0])
        costs = assumed_costs(actor, (actor, critic, critic), device, NODE, BATCH)
        plain = assumed_costs(actor, (), HOPPER, NODE, BATCH)
        return replace(costs, decode=plain.decode, prefill=plain.prefill)  # only scoring is varied


def lengths(generator: np.random.Generator, limit: int, count: int) -> np.ndarray:
    sigma = np.log(SKEW) / P99
    drawn = limit / SKEW * np.exp(sigma * generator.standard_normal(count))
    whole: np.ndarray = np.clip(np.rint(drawn), 1, limit).astype(np.int64)
    return whole


def prompts(generator: np.random.Generator) -> tuple[int, ...]:
    return tuple(generator.integers(64, 257, BATCH).tolist())


def measure(case: PaperCase) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    costs = case.costs()
    model = LengthModel.prior(case.limit)
    for _ in range(4):
        model = model.with_batch(zip(prompts(generator), lengths(generator, case.limit, BATCH).tolist(), strict=True))
    layout = IterationSetup(GPUS // NODE, 0, prompts(generator))
    wall = time.perf_counter()
    choice = choose(model, layout, costs, seed=1)
    wall = time.perf_counter() - wall
    judged = [(prompts(generator), lengths(generator, case.limit, BATCH)) for _ in range(JUDGED)]
    serial, fused, moved, scoring = [], [], [], []
    for own, response in judged:
        shrunk = replace(layout, prompts=own)
        off = simulate(response, shrunk, costs)
        on = simulate(response, shrunk, costs, choice.threshold, choice.pool, model=model)
        serial.append(off.seconds)
        scoring.append(off.scoring_seconds)
        fused.append(on.seconds)
        moved.append(on.moved)
    best = min(point.seconds for point in choice.curve)
    near = [point.threshold / BATCH for point in choice.curve if point.seconds <= 1.01 * best and point.threshold]
    return {
        "actor": case.actor,
        "critic": case.critic,
        "limit": case.limit,
        "scoringEfficiency": case.efficiency,
        "serialSeconds": statistics.mean(serial),
        "fusedSeconds": statistics.mean(fused),
        "speedup": statistics.mean(serial) / statistics.mean(fused),
        "scoringShareOfSerial": statistics.mean(scoring) / statistics.mean(serial),
        "threshold": choice.threshold,
        "thresholdShare": choice.threshold / BATCH,
        "withinOnePercent": [min(near), max(near)] if near else [],
        "pool": choice.pool,
        "workers": layout.generation_workers,
        "moved": statistics.mean(moved),
        "predictedSeconds": choice.seconds,
        "chooseSeconds": wall,
        "curve": [[point.threshold, point.pool, point.seconds] for point in choice.curve],
    }


def sweep(case: PaperCase) -> dict[str, Any]:
    """Time against serial for pools of a fixed size, by threshold: {m: {share of the batch: ratio}}."""
    generator = np.random.default_rng(0)
    costs, layout = case.costs(), IterationSetup(GPUS // NODE, 0, prompts(generator))
    model = LengthModel.prior(case.limit).with_batch((160, int(n)) for n in lengths(generator, case.limit, 4 * BATCH))
    judged = [lengths(generator, case.limit, BATCH) for _ in range(JUDGED // 2)]
    serial = statistics.mean(simulate(response, layout, costs).seconds for response in judged)
    answer: dict[str, Any] = {"actor": case.actor, "critic": case.critic, "limit": case.limit}
    for pool in POOLS:
        times = {
            share: [simulate(own, layout, costs, round(share * BATCH), pool, model=model).seconds for own in judged]
            for share in SHARES
        }
        answer[f"m{pool}"] = {share: statistics.mean(seconds) / serial for share, seconds in times.items()}
    return answer | {"scoringEfficiency": case.efficiency}


def swept(row: dict[str, Any]) -> str:
    best = {pool: min(row[f"m{pool}"].items(), key=lambda item: item[1]) for pool in POOLS}
    words = ", ".join(f"m {pool}: {share:.0%} ({ratio:.3f} of serial)" for pool, (share, ratio) in best.items())
    case = f"{row['actor']}/{row['critic']} limit {row['limit']}, scoring at {row['scoringEfficiency']:.0%} of peak"
    return f"{case}: best threshold of a fixed pool, {words}"


def line(row: dict[str, Any]) -> str:
    near = row["withinOnePercent"]
    plateau = f"{near[0]:.0%} to {near[1]:.0%}" if near else "no threshold"
    return (
        f"{row['actor']}/{row['critic']} limit {row['limit']:>4}, scoring at {row['scoringEfficiency']:.0%} of peak: "
        f"serial {row['serialSeconds']:.2f} s (scoring {row['scoringShareOfSerial']:.0%}), fused "
        f"{row['fusedSeconds']:.2f} s, {row['speedup']:.2f}x; R_t {row['threshold']} "
        f"({row['thresholdShare']:.0%}; within 1%: {plateau}), m {row['pool']} of {row['workers']}"
    )


def picture(rows: list[dict[str, Any]], path: Path) -> None:
    curves = [
        ThresholdCurve(
            f"{row['actor']}/{row['critic']}, limit {row['limit']}, scoring at {row['scoringEfficiency']:.0%} of peak",
            tuple((threshold / BATCH, seconds / row["curve"][0][2]) for threshold, _, seconds in row["curve"]),
            row["thresholdShare"],
        )
        for row in rows
        if (row["actor"], row["critic"]) == ("65B", "33B") and row["limit"] in (512, 2048)
    ]
    title = f"Simulated generation and inference, {GPUS} Hopper-class GPUs, batch {BATCH}"
    path.write_bytes(draw_curves(curves, title, "time against serial", path.suffix.lstrip(".")))
    print(path)


def planning() -> list[dict[str, Any]]:
    """CPU seconds of a simulation and of a choice, the better of two, by workers and samples; 65B/33B, limit 1,024."""
    generator, model, rows = np.random.default_rng(0), LengthModel.prior(1024), []
    costs = replace(PaperCase("65B", "33B", 1024).costs(), max_batch_size=64)
    for workers, samples in ((8, 512), (256, 512), (256, 100_000)):
        layout = IterationSetup(workers, 0, tuple(generator.integers(64, 257, samples).tolist()))
        response = lengths(generator, 1024, samples)
        simulating, choosing = [], []
        for _ in range(2):
            began = time.process_time()
            simulate(response, layout, costs)
            between = time.process_time()
            choose(model, layout, costs)
            simulating.append(between - began)
            choosing.append(time.process_time() - between)
        seconds = {"simulateSeconds": min(simulating), "chooseSeconds": min(choosing)}
        rows.append({"workers": workers, "samples": samples, **seconds})
    return rows


def timeline(path: Path) -> None:
    """One iteration of 128 samples on 8 nodes, 65B actor and 33B critic, scoring at a tenth of the peak."""
    generator = np.random.default_rng(3)
    case, size, nodes = PaperCase("65B", "33B", 1024, EFFICIENCY[2]), 128, 8
    costs, layout = case.costs(), IterationSetup(nodes, 0, prompts(generator)[:size])
    response = lengths(generator, case.limit, size)
    model = LengthModel.prior(case.limit).with_batch((128, int(n)) for n in lengths(generator, case.limit, 4 * BATCH))
    choice = choose(model, layout, costs)
    off = simulate(response, layout, costs, spans=True)
    pictures = [(f"Serial: {off.seconds:.2f} s, idle {off.idle_share:.0%}", off)]
    for how, threshold, pool in (("Auto", choice.threshold, choice.pool), ("Fixed", size // 5, nodes // 4)):
        on = simulate(response, layout, costs, threshold, pool, model=model, spans=True)
        title = (
            f"{how}: R_t {threshold}, m {pool}, {on.moved} samples moved: {on.seconds:.2f} s, idle {on.idle_share:.0%}"
        )
        pictures.append((title, on))
    path.write_bytes(draw_forecasts(pictures, [f"worker {index}" for index in range(nodes)], path.suffix.lstrip(".")))
    print(path, choice.reason)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="draw one iteration before and after, and stop")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw time against R_t there")
    args = parser.parse_args()
    if args.timeline is not None:
        timeline(args.timeline)
        return
    cases = [PaperCase(actor, critic, limit) for actor, critic in PAIRS for limit in LIMITS]
    cases += [PaperCase("65B", "33B", limit, share) for share in EFFICIENCY[1:] for limit in LIMITS]
    rows: list[dict[str, Any]] = []
    for case in cases:
        rows.append(measure(case))
        print(line(rows[-1]), flush=True)
    speedups = [row["speedup"] for row in rows[: len(PAIRS) * len(LIMITS)]]
    print(
        f"at {EFFICIENCY[0]:.0%} of the peak in scoring: {min(speedups):.2f}x to {max(speedups):.2f}x; the paper "
        f"reports {PAPER['generationAndInferenceSpeedup']} with the best threshold near 20%"
    )
    sweeps = [
        sweep(case)
        for case in (PaperCase("13B", "33B", 512), PaperCase("33B", "65B", 512), PaperCase("65B", "33B", 512, 0.05))
    ]
    for row in sweeps:
        print(swept(row))
    costs_of_planning = planning()
    for row in costs_of_planning:
        print(
            f"planning, {row['workers']} workers, {row['samples']} samples: simulation {row['simulateSeconds']:.3f} s, "
            f"choice {row['chooseSeconds']:.2f} s of one core"
        )
    if args.picture is not None:
        picture(rows, args.picture)
    if args.json:
        print(
            json.dumps(
                {
                    "gpus": GPUS,
                    "batch": BATCH,
                    "skew": SKEW,
                    "paper": PAPER,
                    "cases": rows,
                    "fixedPools": sweeps,
                    "planning": costs_of_planning,
                }
            )
        )


if __name__ == "__main__":
    main()
