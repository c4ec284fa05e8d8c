"""Solves small instances exactly by constraint programming (ortools CP-SAT, one worker).

Times are integers: exact if the instance has a decimal grid, otherwise rounded up. Effort is CP-SAT's deterministic
time. Without ortools no instance counts as small enough.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

try:
    from ortools.sat.python import cp_model
except ModuleNotFoundError:
    cp_model = None

from rlhf_planner.schedule.anneal import memory_units
from rlhf_planner.schedule.bounds import step_windows
from rlhf_planner.schedule.simulate import (
    BACKWARD,
    KINDS,
    WEIGHT,
    InstanceArrays,
    Ints,
    Timeline,
    orders_by_start,
    simulate,
)

GRACE = 3.0  # seconds beyond the budget, so that effort ends the solver even in tiny budgets on a busy machine
EXACT_STEPS = 6000 if cp_model else 0  # most steps for the solver


@dataclass(frozen=True, slots=True)
class SolverAnswer:
    """Result of the solver: a schedule if one was found, and the proven lower bound on the objective.

    `bound` is infinite if infeasibility was proven.
    """

    timeline: Timeline | None
    bound: float
    infeasible: bool = False
    effort: float = 0.0  # deterministic time used


@dataclass(frozen=True, slots=True)
class Grid:
    """Integer times: `scale` units per time unit of the instance; `exact` if no duration was rounded."""

    scale: float
    exact: bool

    def up(self, times: object) -> Ints:
        """Return times rounded up to whole units, int64, of the same shape."""
        return np.ceil(np.asarray(times, dtype=np.float64) * self.scale - 1e-6).astype(np.int64)

    def down(self, time: float) -> int:
        """Return a time rounded down to whole units."""
        return int(np.floor(time * self.scale + 1e-6))


def time_grid(arrays: InstanceArrays) -> Grid:
    """Return the coarsest decimal grid of up to four digits that represents all times within 1e-9; without one, a fine
    grid that rounds them.
    """
    times = np.concatenate([arrays.duration, arrays.lag_before, arrays.lag_after])
    for digits in range(5):
        scaled = times * 10**digits
        if np.allclose(scaled, np.round(scaled), rtol=0, atol=1e-9):
            return Grid(float(10**digits), True)
    return Grid(500.0 / float(arrays.duration[arrays.duration > 0].min()), False)


def next_time(arrays: InstanceArrays, makespan: float) -> float:
    """Return the least makespan above one that is proven impossible, or that one if the grid is not exact."""
    grid = time_grid(arrays)
    return (grid.down(makespan) + 1) / grid.scale if grid.exact else makespan


class CpSatModel:
    """A CP-SAT model of one instance with makespan at most `horizon`.

    `steps` are the start variables, [steps], in units of the grid.
    """

    def __init__(self, arrays: InstanceArrays, horizon: float) -> None:
        self.arrays, self.grid = arrays, time_grid(arrays)
        self.model = cp_model.CpModel()
        self.horizon = self.grid.down(horizon)
        self.duration, self.lag_before = self.grid.up(arrays.duration), self.grid.up(arrays.lag_before)
        self.lag_after = self.grid.up(arrays.lag_after)
        head, tail = step_windows(arrays)
        if self.grid.exact:
            low, high = self.grid.up(head), self.horizon - self.grid.up(tail)
        else:  # sums of rounded times differ from rounded sums: only a step's own minimum is used
            low, high = (
                np.zeros(arrays.steps, dtype=np.int64),
                self.horizon - np.repeat(self.duration, np.diff(arrays.base)),
            )
        self.possible = bool((low <= high).all())
        self.steps: list[Any] = []
        if self.possible:
            self.steps = [self.model.new_int_var(int(a), int(b), "") for a, b in zip(low, high, strict=True)]
            self._precedences()
            self._devices()

    def end(self, step: int, operation: int) -> Any:
        """Return the expression for the end of a step of this operation."""
        return self.steps[step] + int(self.duration[operation])

    def _precedences(self) -> None:
        arrays, add = self.arrays, self.model.add
        for k in range(arrays.stages):
            first = [int(arrays.base[op]) for op in range(KINDS * k, KINDS * k + KINDS)]
            forward = KINDS * k
            for m in range(int(arrays.microbatches[k])):
                f, b, w = (at + m for at in first)
                if arrays.before[k] >= 0:
                    upstream = int(arrays.base[forward - KINDS]) + m
                    add(self.steps[f] >= self.end(upstream, forward - KINDS) + int(self.lag_before[k]))
                if arrays.after[k] >= 0:
                    downstream = int(arrays.base[forward + KINDS + BACKWARD]) + m
                    lag = int(self.lag_after[k])
                    add(self.steps[b] >= self.end(downstream, forward + KINDS + BACKWARD) + lag)
                else:
                    add(self.steps[b] >= self.end(f, forward))
                if arrays.weight[k]:
                    add(self.steps[w] >= self.end(b, forward + BACKWARD))
                if m:
                    for op in arrays.operations(k):
                        step = int(arrays.base[op]) + m
                        add(self.steps[step] >= self.end(step - 1, op))

    def _devices(self) -> None:
        arrays = self.arrays
        for device in range(arrays.instance.devices):
            intervals = [
                self.model.new_fixed_size_interval_var(self.steps[step], int(self.duration[op]), "")
                for k in np.flatnonzero(arrays.device == device)
                for op in arrays.operations(int(k))
                for step in range(int(arrays.base[op]), int(arrays.base[op + 1]))
            ]
            self.model.add_no_overlap(intervals)

    def cap(self, cap: float) -> None:
        """Limit every device's memory to `cap`, in activation units."""
        arrays, units = self.arrays, memory_units(self.arrays)
        for device in range(arrays.instance.devices):
            intervals, demands = [], []
            for k in np.flatnonzero(arrays.device == device):
                amount = round(float(arrays.activation[k]) * units.scale)
                last = KINDS * int(k) + (WEIGHT if arrays.weight[k] else BACKWARD)
                for m in range(int(arrays.microbatches[k]) if amount else 0):
                    start, end = self.steps[int(arrays.base[KINDS * k]) + m], self.end(int(arrays.base[last]) + m, last)
                    size = self.model.new_int_var(0, self.horizon, "")
                    intervals.append(self.model.new_interval_var(start, size, end, ""))
                    demands.append(amount)
            self.model.add_cumulative(intervals, demands, units.from_activation(cap))

    def makespan(self, low: float) -> Any:
        """Return a variable for the makespan, at least `low` rounded down to the grid, and set it as the objective."""
        arrays = self.arrays
        variable = self.model.new_int_var(min(self.grid.down(low), self.horizon), self.horizon, "")
        for op in range(KINDS * arrays.stages):
            if arrays.base[op + 1] > arrays.base[op]:
                self.model.add(variable >= self.end(int(arrays.base[op + 1]) - 1, op))
        self.model.minimize(variable)
        return variable

    def hint(self, timeline: Timeline) -> None:
        """Let the solver start from a schedule."""
        for variable, start in zip(self.steps, self.grid.up(timeline.start), strict=True):
            self.model.add_hint(variable, int(start))

    def solve(self, effort: float, seconds: float, seed: int, dynamic: bool = False) -> SolverAnswer:
        """Run CP-SAT and return its answer; the bound is in time units of the instance.

        `effort` is deterministic time and `seconds` the backstop by the clock.
        """
        impossible = SolverAnswer(None, float("inf"), infeasible=True) if self.grid.exact else SolverAnswer(None, 0.0)
        if not self.possible:
            return impossible
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = seed
        solver.parameters.use_dynamic_precedence_in_disjunctive = dynamic
        solver.parameters.max_deterministic_time = max(effort, 1e-3)
        solver.parameters.max_time_in_seconds = max(seconds, 0.0) + GRACE
        status = solver.solve(self.model)
        used = float(solver.response_proto.deterministic_time)
        if status == cp_model.INFEASIBLE:
            return replace(impossible, effort=used)
        bound = solver.best_objective_bound / self.grid.scale if self.grid.exact and self.model.has_objective() else 0.0
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return SolverAnswer(None, bound, effort=used)
        start = np.array([solver.value(variable) for variable in self.steps], dtype=np.float64)
        timeline = simulate(self.arrays, orders_by_start(self.arrays, start))
        return SolverAnswer(timeline, bound, effort=used)


def decide(
    arrays: InstanceArrays,
    horizon: float,
    cap: float | None,
    effort: float,
    seconds: float,
    seed: int,
    dynamic: bool = False,
) -> SolverAnswer:
    """Return a schedule with makespan at most `horizon` under the cap, or a proof that none exists, or neither."""
    model = CpSatModel(arrays, horizon)
    if cap is not None and model.possible:
        model.cap(cap)
    return model.solve(effort, seconds, seed, dynamic)


def minimise_makespan(
    arrays: InstanceArrays, low: float, incumbent: Timeline, cap: float | None, effort: float, seconds: float, seed: int
) -> SolverAnswer:
    """Return the shortest schedule found under the cap, if any, at most as long as `incumbent`.

    The answer's bound is at least `low`.
    """
    if incumbent.arrays is not arrays:
        raise ValueError("the incumbent must be a schedule of the same layout")
    model = CpSatModel(arrays, incumbent.makespan)
    if not model.possible:
        return SolverAnswer(None, low)
    if cap is not None:
        model.cap(cap)
    model.makespan(low)
    if model.grid.exact:
        model.hint(incumbent)
    answer = model.solve(effort, seconds, seed)
    bound = incumbent.makespan if answer.infeasible else max(low, answer.bound)
    return SolverAnswer(answer.timeline, bound, answer.infeasible, answer.effort)


def device_peak_bound(arrays: InstanceArrays, device: int, horizon: float, effort: float, seconds: float) -> float:
    """Return a proven lower bound on the peak of one device at makespan `horizon`, with no limits on other devices.

    The bound is in activation units.
    """
    grid, units = time_grid(arrays), memory_units(arrays)
    stages = np.flatnonzero(arrays.device == device)
    least = float(max((arrays.activation[k] for k in stages), default=0.0))
    if not grid.exact or not len(stages):
        return least
    head, tail = step_windows(arrays)
    latest = horizon - tail
    model = cp_model.CpModel()
    if (head > latest + 1e-6).any():
        return least
    amounts = [round(float(arrays.activation[k]) * units.scale) for k in stages]
    most = sum(h * int(arrays.microbatches[k]) for h, k in zip(amounts, stages, strict=True))
    capacity = model.new_int_var(units.from_activation(least), most, "")
    machine, intervals, demands = [], [], []
    for k, amount in zip(stages, amounts, strict=True):
        previous: dict[int, Any] = {}
        for m in range(int(arrays.microbatches[k])):
            start = {}
            for op in arrays.operations(int(k)):
                step, length = int(arrays.base[op]) + m, int(grid.up(arrays.duration[op]))
                start[op] = model.new_int_var(int(grid.up(head[step])), grid.down(float(latest[step])), "")
                machine.append(model.new_fixed_size_interval_var(start[op], length, ""))
                if previous:
                    model.add(start[op] >= previous[op] + length)
            chain = list(arrays.operations(int(k)))
            for a, b in pairwise(chain):
                # The way through the later stages and back, or just the step itself.
                least_gap = head[int(arrays.base[b])] - head[int(arrays.base[a])]
                model.add(start[b] >= start[a] + int(grid.up(least_gap)))
            previous = start
            freed = start[chain[-1]] + int(grid.up(arrays.duration[chain[-1]]))
            size = model.new_int_var(0, grid.down(horizon), "")
            intervals.append(model.new_interval_var(start[chain[0]], size, freed, ""))
            demands.append(amount)
    model.add_no_overlap(machine)
    model.add_cumulative(intervals, demands, capacity)
    model.minimize(capacity)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = max(effort, 1e-3)
    solver.parameters.max_time_in_seconds = max(seconds, 0.0) + GRACE
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN):
        return least
    return max(least, float(np.ceil(solver.best_objective_bound - 1e-6)) / units.scale)
