"""What an iteration of generation and inference takes, sample by sample, under a threshold and a pool.

    generate -> at most R_t unfinished, none queued: place -> moves -> the pool decodes the tail
                                                        `-> released workers score, beside the dedicated ones

Threshold 0, or a pool of all workers, is no fusion: generation goes on where it is, and generation workers score only
where there is no dedicated inference worker, after all samples are generated. What is simplified: all samples that move
to one worker join it together, when the last of them is there; those that bring their KV cache are decoded at their
source until then, at its pace. Lengths are known to the simulation but not to `place`, which predicts, as it will.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rlhf_planner.inter_stage.costs import Floats, StageCosts, Transfer
from rlhf_planner.inter_stage.decode import Generation, drain, generate
from rlhf_planner.inter_stage.layout import Forecast, Layout, Span, Transit
from rlhf_planner.inter_stage.lengths import Ints, LengthModel
from rlhf_planner.inter_stage.place import Held, assign
from rlhf_planner.inter_stage.scoring import Scored, score


def simulate(
    lengths: Sequence[int] | Ints,
    layout: Layout,
    costs: StageCosts,
    threshold: int = 0,
    pool: int | None = None,
    transfer: Transfer = "Auto",
    *,
    model: LengthModel | None = None,
    spans: bool = False,
) -> Forecast:
    """lengths: [batch] tokens of each response. `model` is what `place` predicts by; None: it knows no lengths.

    Raises ValueError for lengths that do not fit the layout, or are below 1.
    """
    known = np.asarray(lengths, dtype=np.int64)
    if len(known) != layout.batch:
        raise ValueError(f"lengths has {len(known)} samples, the layout {layout.batch}")
    if (known < 1).any():
        raise ValueError(f"a response of {int(known.min())} tokens: every response has at least 1")
    generation = generate(known, layout, costs)
    return forecast(generation, layout, costs, threshold, pool, transfer, model=model, spans=spans)


def forecast(
    generation: Generation,
    layout: Layout,
    costs: StageCosts,
    threshold: int,
    pool: int | None,
    transfer: Transfer,
    *,
    model: LengthModel | None = None,
    spans: bool = False,
) -> Forecast:
    """`simulate` for a generation that is worked out already: thresholds and pools of one draw share it."""
    workers = layout.generation_workers
    fused = threshold > 0 and pool is not None and pool < workers
    tail = _tail(generation, costs, threshold, pool, transfer, model) if fused and pool is not None else None
    finish = generation.finish if tail is None else tail.finish
    end = float(finish.max())
    released: list[float | None] = [None] * workers
    if tail is not None:
        released = [moment + costs.wake_seconds for moment in tail.free.tolist()]
    elif not layout.inference_workers:
        released = [end + costs.wake_seconds] * workers
    available = {index: moment for index, moment in enumerate(released) if moment is not None}
    available |= dict.fromkeys(range(workers, workers + layout.inference_workers), 0.0)
    arrivals = finish if layout.overlap else np.full(layout.batch, end)
    scored = score(arrivals, generation.prompts + generation.lengths, available, costs)
    seconds = max(end, scored.end)
    decoding = [line.busy for line in generation.timelines] if tail is None else tail.busy
    return Forecast(
        seconds=seconds,
        generation_seconds=end,
        scoring_seconds=seconds - end,
        threshold=threshold if tail is not None else 0,
        pool=workers if tail is None else len(tail.pool),
        threshold_seconds=None if tail is None else tail.start,
        moved=0 if tail is None else len(tail.transits),
        moved_by_kv=0 if tail is None else sum(move.kv for move in tail.transits),
        moved_bytes=0.0 if tail is None else tail.bytes,
        released=tuple(released),
        idle=_idle(seconds, decoding, scored, workers + layout.inference_workers),
        finished=tuple(finish.tolist()),
        spans=_spans(generation, tail, released, scored, costs) if spans else (),
        transits=tuple(tail.transits) if tail is not None else (),
    )


def _idle(seconds: float, decoding: Sequence[float], scored: Scored, workers: int) -> tuple[float, ...]:
    if seconds <= 0:
        return (0.0,) * workers
    busy = [
        scored.busy.get(index, 0.0) + (decoding[index] if index < len(decoding) else 0.0) for index in range(workers)
    ]
    return tuple(max(0.0, 1 - each / seconds) for each in busy)


# ---------------------------------------------------------------- the tail


class _Tail(NamedTuple):
    start: float
    pool: list[int]
    finish: Floats
    free: Floats
    """[workers] when each has nothing left to decode."""
    busy: list[float]
    """[workers] seconds of decoding and prefilling."""
    transits: list[Transit]
    bytes: float
    drained: list[tuple[int, float, float, int]]
    """(worker, start, end, rows) of what the pool decodes after samples joined it."""


def _tail(
    generation: Generation,
    costs: StageCosts,
    threshold: int,
    pool: int,
    transfer: Transfer,
    model: LengthModel | None,
) -> _Tail:
    start = generation.threshold_time(threshold)
    samples = np.flatnonzero(generation.finish > start)
    held = _held(generation, samples, start, model)
    limit = model.max_tokens if model is not None else int(generation.lengths.max())
    workers = len(generation.timelines)
    stays, moving, destination, kv = assign(held, workers, pool, costs, limit, transfer)
    transits = _transits(held, samples, moving, destination, kv, start, costs)
    finish = generation.finish.copy()
    free = np.array([max(start, line.busy) for line in generation.timelines])
    busy = [line.busy for line in generation.timelines]
    staying = set(stays)
    for worker in range(workers):
        if worker not in staying:
            leaves = [
                move.end if move.kv else start + costs.command_seconds for move in transits if move.source == worker
            ]
            free[worker] = max(leaves, default=start)
            busy[worker] = min(busy[worker], float(free[worker]))
    drained = []
    for worker in sorted({move.destination for move in transits}):
        arriving = [move for move in transits if move.destination == worker]
        piece = _join(generation, worker, arriving, start, costs, finish)
        free[worker] = piece[2]
        busy[worker] = min(busy[worker], piece[1]) + piece[2] - piece[1]
        drained.append(piece)
    sent = sum(
        costs.kv_bytes_per_token * (held.prompt[row] + held.tokens[row])
        for row, by_kv in zip(moving.tolist(), kv.tolist(), strict=True)
        if by_kv
    )
    return _Tail(start, stays, finish, free, busy, transits, float(sent), drained)


def _held(generation: Generation, samples: Ints, moment: float, model: LengthModel | None) -> Held:
    """What is unfinished at a time, as `place` would be told."""
    steps = np.array([line.steps_at(moment) for line in generation.timelines])
    worker = generation.worker[samples]
    tokens = _tokens(generation, samples, steps[worker])
    prompt = generation.prompts[samples].astype(np.int64)
    remaining = np.ones(len(samples)) if model is None else model.remaining_each(tokens, prompt)
    return Held(worker, prompt, tokens, remaining)


def _tokens(generation: Generation, samples: Ints, steps: Floats) -> Ints:
    done = np.floor(steps + 1e-9).astype(np.int64) - generation.begun[samples]
    answer: Ints = np.clip(done, 0, generation.lengths[samples] - 1)
    return answer


def _transits(
    held: Held,
    samples: Ints,
    moving: Ints,
    destination: Ints,
    kv: np.ndarray[tuple[int], np.dtype[np.bool_]],
    start: float,
    costs: StageCosts,
) -> list[Transit]:
    """Links of a source and of a destination carry one KV cache at a time."""
    free: dict[tuple[str, int], float] = {}
    answer = []
    for row, to, by_kv in zip(moving.tolist(), destination.tolist(), kv.tolist(), strict=True):
        source, end = int(held.worker[row]), start + costs.command_seconds
        if by_kv:
            begin = max(end, free.get(("from", source), 0.0), free.get(("to", to), 0.0))
            end = begin + costs.kv_seconds(float(held.prompt[row] + held.tokens[row]))
            free["from", source] = free["to", to] = end
        answer.append(Transit(int(samples[row]), source, to, by_kv, start, end))
    return answer


def _join(
    generation: Generation, worker: int, arriving: Sequence[Transit], start: float, costs: StageCosts, finish: Floats
) -> tuple[int, float, float, int]:
    """Writes the finish times of what a worker of the pool decodes once `arriving` are there; says when that was."""
    line = generation.timelines[worker]
    moment, steps = line.boundary(max(move.end for move in arriving))
    own = np.flatnonzero((generation.worker == worker) & (generation.finish > moment + 1e-12))
    done = _tokens(generation, own, np.full(len(own), float(steps)))
    left, context = [generation.lengths[own] - done], [generation.prompts[own] + done]
    rebuilt_prompts, rebuilt_tokens, came = 0, 0.0, [own]
    for move in arriving:
        source = generation.timelines[move.source]
        one = np.array([move.sample])
        if move.kv and generation.finish[move.sample] <= moment:
            continue  # finished at its source before it was handed over
        until = moment if move.kv else start
        tokens = _tokens(generation, one, np.array([source.steps_at(until)]))
        if not move.kv:
            rebuilt_prompts += 1
            rebuilt_tokens += float(generation.prompts[move.sample]) + (0 if costs.replays else int(tokens[0]))
            tokens = np.zeros(1, dtype=np.int64) if costs.replays else tokens
        came.append(one)
        left.append(generation.lengths[one] - tokens)
        context.append(generation.prompts[one] + tokens)
    if rebuilt_prompts:
        moment += costs.prefill_seconds(rebuilt_prompts, rebuilt_tokens / rebuilt_prompts)
    rows = np.concatenate(came)
    if not len(rows):
        return worker, moment, moment, 0
    ends = drain(moment, np.concatenate(left), np.concatenate(context), costs)
    finish[rows] = ends.finish
    return worker, moment, float(ends.times[-1]), len(rows)


# ---------------------------------------------------------------- for drawing


def _spans(
    generation: Generation, tail: _Tail | None, released: Sequence[float | None], scored: Scored, costs: StageCosts
) -> tuple[Span, ...]:
    answer = []
    joined = {piece[0]: piece for piece in tail.drained} if tail is not None else {}
    for worker, line in enumerate(generation.timelines):
        held = int((generation.worker == worker).sum())
        end = line.busy
        if worker in joined:
            end = min(end, joined[worker][1])
        elif tail is not None and worker not in tail.pool:
            end = min(end, float(tail.free[worker]))
        if end > 0:
            answer.append(Span(worker, "decode", 0.0, end, held))
        if worker in joined:
            _, start, end, rows = joined[worker]
            answer.append(Span(worker, "decode", start, end, rows))
        free = released[worker]
        if free is not None and costs.wake_seconds > 0:
            answer.append(Span(worker, "wake", free - costs.wake_seconds, free, 0))
    answer += [Span(worker, "score", start, end, samples) for worker, start, end, samples in scored.passes]
    return tuple(answer)
