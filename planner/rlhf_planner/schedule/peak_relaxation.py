"""Computes a lower bound on the peak of any schedule, over all devices, from the duals of a linear program.

PDLP solves the program inexactly; weak duality makes the bound valid for any dual values. Must never influence the
search: its last digits may differ between machines.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd

import numpy as np

try:
    from ortools.linear_solver import linear_solver_pb2
    from ortools.pdlp import solvers_pb2
    from ortools.pdlp.python import pdlp
except ModuleNotFoundError:
    pdlp = None

from rlhf_planner.schedule.anneal import memory_units
from rlhf_planner.schedule.bounds import step_windows
from rlhf_planner.schedule.exact import time_grid
from rlhf_planner.schedule.simulate import KINDS, Floats, InstanceArrays

ITERATION = 4e-9  # nominal seconds of one iteration, per entry of the program
ENTRIES = 8  # nominal entries of the program, per variable
BUILDING = 5e-5  # nominal seconds of writing the program, per variable
FEWEST_ITERATIONS = 1000  # with fewer iterations it is not tried
_MOST_VARIABLES = 200_000  # of a program
_TOLERANCE = 1e-4
_WIDEST = 1_000_000  # memory units up to which sums of activations are distinguished

Term = tuple[float, int, float]  # factor, variable (-1: none), constant that replaces it


@dataclass(frozen=True, slots=True)
class RelaxedBound:
    """A proven lower `bound` on the peak, in activation units, and its nominal `seconds`; both 0 if not tried."""

    bound: float = 0.0
    seconds: float = 0.0


def relaxed_peak_bound(
    arrays: InstanceArrays, horizon: float, most: float, nominal: float, seconds: float
) -> RelaxedBound:
    """Return a lower bound on the peak of any schedule with makespan at most `horizon` and peak at most `most`.

    `nominal` is the effort in seconds of an idle core. The bound is 0 if it is not tried.
    """
    unit = _common_unit(arrays)
    if unit is None or seconds <= 0 or nominal < least_seconds(arrays, horizon):
        return RelaxedBound()
    variables = _variables(arrays, horizon, unit)
    iterations = int((nominal - BUILDING * variables) / (ITERATION * ENTRIES * variables))
    program = _program(arrays, horizon, most, unit)
    if program is None:
        return RelaxedBound()
    bound, iterations_done = program.solve(iterations, seconds)
    used = BUILDING * variables + ITERATION * ENTRIES * variables * iterations_done
    return RelaxedBound(attainable(arrays, bound, most), used)


def least_seconds(arrays: InstanceArrays, horizon: float) -> float:
    """Return the nominal seconds below which the bound is not tried; infinity if it is never tried."""
    unit = _common_unit(arrays)
    variables = _variables(arrays, horizon, unit) if unit else 0
    if pdlp is None or not 0 < variables <= _MOST_VARIABLES:
        return float("inf")
    return BUILDING * variables + FEWEST_ITERATIONS * ITERATION * ENTRIES * variables


def _variables(arrays: InstanceArrays, horizon: float, unit: float) -> int:
    return sum(len(arrays.operations(k)) for k in range(arrays.stages)) * int(horizon / unit + 1)


def attainable(arrays: InstanceArrays, bound: float, most: float) -> float:
    """Return the least sum of activations on one device from `bound` to `most`; without one, `most`.

    If that range is empty, starts at 0 or is too wide to try, return the bound, at most `most`.
    """
    units = memory_units(arrays)
    low, high = int(np.ceil(bound * units.scale - 1e-3)), units.from_activation(most)
    if not 0 < low < high <= _WIDEST:
        return min(bound, most)
    least = high
    for device in range(arrays.instance.devices):
        sums = np.zeros(high + 1, dtype=bool)
        sums[0] = True
        for k in np.flatnonzero(arrays.device == device):
            amount = round(float(arrays.activation[k]) * units.scale)
            for _ in range(min(int(arrays.microbatches[k]), high // amount) if amount else 0):
                sums[amount:] |= sums[:-amount].copy()
        above = np.flatnonzero(sums[low:])
        least = min(least, low + int(above[0])) if len(above) else least
    return least / units.scale


def _common_unit(arrays: InstanceArrays) -> float | None:
    """Return the largest common divisor of all durations and transfers; None without a decimal grid, or if all are
    zero.
    """
    grid = time_grid(arrays)
    times = [int(time) for part in (arrays.duration, arrays.lag_before, arrays.lag_after) for time in grid.up(part)]
    return gcd(*times) / grid.scale if grid.exact and any(times) else None


@dataclass
class _Program:
    """Minimizes the first variable, the peak. Each row limits a sum."""

    most: float
    low: list[float] = field(default_factory=lambda: [0.0])
    high: list[float] = field(default_factory=list)
    rows: list[dict[int, float]] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.high.append(self.most)

    def variable(self, low: float, high: float) -> int:
        """Return a new variable with these limits."""
        self.low.append(low)
        self.high.append(high)
        return len(self.low) - 1

    def at_most(self, terms: list[Term], limit: float) -> None:
        """Add a row unless it has no variable; constants are moved to its limit."""
        row: dict[int, float] = {}
        for factor, variable, constant in terms:
            if variable < 0:
                limit -= factor * constant
            else:
                row[variable] = row.get(variable, 0.0) + factor
        if row:
            self.rows.append(row)
            self.limits.append(limit)

    def solve(self, iterations: int, seconds: float) -> tuple[float, int]:
        """Return a proven lower bound on the first variable, and the iterations made."""
        model = linear_solver_pb2.MPModelProto()
        for low, high in zip(self.low, self.high, strict=True):
            model.variable.add(lower_bound=low, upper_bound=high)
        model.variable[0].objective_coefficient = 1.0
        for row, limit in zip(self.rows, self.limits, strict=True):
            constraint = model.constraint.add(lower_bound=float("-inf"), upper_bound=limit)
            constraint.var_index.extend(row.keys())
            constraint.coefficient.extend(row.values())
        parameters = solvers_pb2.PrimalDualHybridGradientParams()
        ends = parameters.termination_criteria
        ends.iteration_limit, ends.time_sec_limit = iterations, seconds
        ends.simple_optimality_criteria.eps_optimal_absolute = _TOLERANCE
        ends.simple_optimality_criteria.eps_optimal_relative = _TOLERANCE
        result = pdlp.primal_dual_hybrid_gradient(pdlp.qp_from_mpmodel_proto(model, True), parameters)
        return self._proven(np.asarray(result.dual_solution)), int(result.solve_log.iteration_count)

    def _proven(self, duals: Floats) -> float:
        """Return the bound by weak duality, which is valid for any row multipliers that are not above 0."""
        weights = np.minimum(np.nan_to_num(duals), 0.0)
        reduced = np.zeros(len(self.low))
        reduced[0] = 1.0
        for weight, row in zip(weights, self.rows, strict=True):
            if weight:
                for variable, factor in row.items():
                    reduced[variable] -= weight * factor
        least = np.minimum(reduced * np.array(self.low), reduced * np.array(self.high)).sum()
        return float(weights @ np.array(self.limits) + least)


def _program(arrays: InstanceArrays, horizon: float, most: float, unit: float) -> _Program | None:
    """Return the program of an instance, in time units of `unit`; None if no schedule meets the horizon."""
    head, tail = step_windows(arrays)
    earliest = np.round(head / unit, 6)
    end = int(horizon / unit + 1e-6)
    latest = end - np.round(tail / unit, 6)
    if (earliest > latest + 1e-6).any():
        return None
    program = _Program(most)
    started = _Started(arrays, program, earliest, latest, end)
    length = [round(float(duration) / unit) for duration in arrays.duration]
    for k in range(arrays.stages):
        for earlier, later, lag in _precedences(arrays, k):
            wait = length[earlier] + round(lag / unit)
            for moment in range(end + 1):
                program.at_most([started.by(later, moment, 1.0), started.by(earlier, moment - wait, -1.0)], 0.0)
    for device in range(arrays.instance.devices):
        stages = [int(k) for k in np.flatnonzero(arrays.device == device)]
        for moment in range(end + 1 if stages else 0):
            busy, memory = [], [(-1.0, 0, 0.0)]
            for k in stages:
                for op in arrays.operations(k):
                    busy += [started.by(op, moment, 1.0), started.by(op, moment - length[op], -1.0)]
                amount, freeing = float(arrays.activation[k]), arrays.operations(k)[-1]
                memory.append(started.by(KINDS * k, moment, amount))
                memory.append(started.by(freeing, moment - length[freeing], -amount))
            program.at_most(busy, 1.0)
            program.at_most(memory, 0.0)
    return program


class _Started:
    """Number of steps of an operation that have started by a moment: a variable, or a number if windows
    determine it."""

    def __init__(self, arrays: InstanceArrays, program: _Program, earliest: object, latest: object, end: int) -> None:
        self.end = end
        self.terms: dict[tuple[int, int], tuple[int, float]] = {}
        early, late = np.asarray(earliest), np.asarray(latest)
        for k in range(arrays.stages):
            for op in arrays.operations(k):
                steps = slice(int(arrays.base[op]), int(arrays.base[op + 1]))
                for moment in range(end + 1):
                    low, high = int((late[steps] <= moment).sum()), int((early[steps] <= moment).sum())
                    term = (-1, float(low)) if low == high else (program.variable(low, high), 0.0)
                    self.terms[op, moment] = term
                    if moment:
                        program.at_most([(1.0, *self.terms[op, moment - 1]), (-1.0, *term)], 0.0)

    def by(self, op: int, moment: int, factor: float) -> Term:
        """Return the count of one operation by a moment, times a factor."""
        if moment < 0:
            return factor, -1, 0.0
        return factor, *self.terms[op, min(moment, self.end)]


def _precedences(arrays: InstanceArrays, k: int) -> list[tuple[int, int, float]]:
    """Return (earlier, later, time between) for a stage's operations and those before them in a micro-batch."""
    chain = list(arrays.operations(k))
    forward, backward = chain[0], chain[1]
    pairs = [(backward, chain[2], 0.0)] if len(chain) > 2 else []
    if arrays.before[k] >= 0:
        pairs.append((forward - KINDS, forward, float(arrays.lag_before[k])))
    if arrays.after[k] >= 0:
        pairs.append((backward + KINDS, backward, float(arrays.lag_after[k])))
    return [*pairs, (forward, backward, 0.0)]
