"""Runs decode steps over an engine's samples: feeds tokens, records drawn ones, and finishes responses.

Rule: a sample may be fed several positions in a step, known tokens in a replay or drafted ones. Must never record a
token whose log-probability is not finite.
"""

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlhf_workers.generation.engine import EngineError, SamplingParameters, StepReport
from rlhf_workers.generation.requests import sample_name
from rlhf_workers.generation.speculation.speculator import Verified
from rlhf_workers.generation.stopping import StopRule
from rlhf_workers.generation.torch_engine.decode_pass import (
    INPUTS,
    POSITIONS,
    REPLAY_ROWS,
    ROWS,
    TOKENS,
    UNIFORMS,
    PassDecoder,
    PassResult,
)
from rlhf_workers.generation.torch_engine.drafting import Drafting
from rlhf_workers.generation.torch_engine.engine_state import EngineState
from rlhf_workers.generation.torch_engine.kv_pools import DecodePass
from rlhf_workers.generation.torch_engine.response_table import Slots
from rlhf_workers.generation.torch_engine.tiles import Tiles
from rlhf_workers.generation.torch_engine.verification import cut_at_ends, verdict


@dataclass
class Launched:
    """A launched pass."""

    run: DecodePass
    result: PassResult


class Decoding:
    """The decode steps of one engine."""

    def __init__(
        self,
        decoder: PassDecoder,
        parameters: SamplingParameters,
        stop: StopRule,
        tiles: Tiles | None,
        drafting: Drafting,
    ) -> None:
        """`tiles` are those of a deterministic engine, else None."""
        self.stop = stop
        self.drafting = drafting
        self._decoder = decoder
        self._parameters = parameters
        self._tiles = tiles

    def step(self, state: EngineState, version: int, report: StepReport) -> None:
        """Advance every sample in the table that is not paused by one or several tokens; whole responses go to
        `state.complete`."""
        self.drafting.follow(state)
        counts, drafted = self._counts(state, report)
        started = time.perf_counter_ns()
        passes = [run for run in state.pools.passes(state.table.position, counts) if self._lives(state, run)]
        launched = [self._launch(state, run) for run in passes]
        for launch in launched:
            if launch.run.rows is None:
                self._record(state, launch, version, report)
        several = [launch for launch in launched if launch.run.rows is not None]
        outcomes: list[Verified] = []
        if several and counts is not None:
            outcomes = self._record_several(state, several, counts, drafted, version, report)
            report.verify_ns = time.perf_counter_ns() - started
        report.passes = len(passes)
        report.graph_passes, report.capture_ns = self._decoder.since()
        self.drafting.verified(outcomes, report, (time.perf_counter_ns() - started) / 1e9)
        self.drafting.follow(state)

    def free(self, state: EngineState, slots: Slots) -> None:
        """Drop samples without telling the drafters."""
        if len(slots):
            state.pools.drop(slots)
            for slot in slots:
                state.table.remove(int(slot))

    # ------------------------------------------------------------ inputs

    def _counts(self, state: EngineState, report: StepReport) -> tuple[Slots | None, Slots]:
        """Return the rows of every slot (None: one each), and how many of them are drafts."""
        table = state.table
        drafted = np.zeros(len(table.requests), np.int64)
        if not (self.drafting.enabled or self._tiles is not None or state.turn_cache is not None):
            return None, drafted
        slots = table.occupied()
        wanted = self.drafting.wants(state, slots)
        if not (wanted or (table.known_ahead(slots) > 0).any()):
            return None, drafted
        proven = self._proven(state, slots)
        if wanted:
            drafted[slots] = self.drafting.propose(state, slots, proven, report)
        counts = 1 + drafted
        resumed = slots[proven & (table.known_ahead(slots) > 0) & ~table.paused[slots]]
        if len(resumed):
            position = table.position[resumed]
            most = np.minimum(state.pools.reach(position) - position, REPLAY_ROWS // len(resumed))
            counts[resumed] = np.maximum(np.minimum(table.known_ahead(resumed) + 1, most), 1)
        return (counts if (counts > 1).any() else None), drafted

    def _proven(self, state: EngineState, slots: Slots) -> npt.NDArray[np.bool_]:
        """Return [n]: whether passes may have several rows of a sample, in the pool of each slot."""
        if self._tiles is None:
            return np.ones(len(slots), bool)
        ends = state.pools.reach(state.table.position[slots])
        return np.array([self._tiles.proven_several(int(end)) for end in ends], bool)

    def _lives(self, state: EngineState, run: DecodePass) -> bool:
        return run.rows is not None or not state.table.paused[run.slots].all()

    def _launch(self, state: EngineState, run: DecodePass) -> Launched:
        inputs, table, count = np.zeros((INPUTS, run.width), np.int64), state.table, len(run.slots)
        ahead: Slots | int = 0 if run.rows is None else run.rows.ahead
        inputs[TOKENS, :count] = table.fed(run.slots, ahead)
        inputs[POSITIONS, :count] = table.position[run.slots] + ahead
        if run.rows is None:
            if self._parameters.random:
                inputs[UNIFORMS, :count] = table.uniform(run.slots).view(np.int64)
            return Launched(run, self._decoder.launch(run, inputs))
        inputs[ROWS, :count] = run.rows.pool
        if self._parameters.random:
            new = np.flatnonzero(ahead >= table.known_ahead(run.slots))
            inputs[UNIFORMS, new] = table.uniform(run.slots[new], run.rows.ahead[new]).view(np.int64)
        inputs[:, count:] = inputs[:, count - 1 : count]  # padding repeats the last row, which writes the same numbers
        return Launched(run, self._decoder.launch(run, inputs))

    # ------------------------------------------------------------ outputs

    def _record(self, state: EngineState, launched: Launched, version: int, report: StepReport) -> None:
        """Wait for a pass with one row per sample, record its tokens, and finish samples."""
        run, table = launched.run, state.table
        live = ~table.paused[run.slots]
        drawn, drawn_log_probabilities = launched.result.wait()
        slots = run.slots[live]
        sampled = drawn[: len(run.slots)][live]
        log_probabilities = drawn_log_probabilities[: len(run.slots)][live]
        if not np.isfinite(log_probabilities).all():
            self._refuse(state, slots[~np.isfinite(log_probabilities)], version)
        self._count(state, run.slots, len(run.slots), run.length, report)
        fresh = table.advance(slots, sampled, log_probabilities, version)
        report.decoded += int(fresh.sum())
        report.replayed += int((~fresh).sum())
        report.replayed_samples += int((~fresh).sum())
        report.prefilled += int((~fresh).sum())
        new = slots[fresh]
        report.began += table.keys(new[table.length[new] == table.known[new] + 1])
        self._finish(state, new, sampled[fresh])

    def _record_several(
        self,
        state: EngineState,
        launched: list[Launched],
        counts: Slots,
        drafted: Slots,
        version: int,
        report: StepReport,
    ) -> list[Verified]:
        """Wait for passes with several rows per sample, and keep what single steps would have drawn."""
        table = state.table
        slots, tokens, log_probabilities = self._gathered(launched, counts, len(table.requests), report, state)
        live = ~table.paused[slots]
        slots, tokens, log_probabilities = slots[live], tokens[live], log_probabilities[live]
        ahead, known_counts = np.arange(tokens.shape[1]), table.known_ahead(slots)
        following = np.minimum(ahead + 1, counts[slots, None] - 1)
        fed = table.fed(slots[:, None], following)
        judged = verdict(tokens, fed, known_counts, counts[slots])
        ids = self.stop.is_stop[tokens]
        at_limit = table.length[slots, None] + ahead - known_counts[:, None] + 1 >= table.limit[slots, None]
        cut, ended = cut_at_ends(judged, ids | at_limit, known_counts)
        bad = ~np.isfinite(log_probabilities) & (ahead < cut.positions[:, None])
        if bad.any():
            self._refuse(state, slots[bad.any(axis=1)], version)
        before = table.length[slots]
        table.advance_by(slots, cut.positions, tokens, log_probabilities, version)
        stopped = ended & ids[np.arange(len(slots)), cut.positions - 1]
        if self.stop.has_strings:
            ended, stopped = self._ended_by_string(state, slots, before, ended, stopped)
        new = table.length[slots] - before
        report.decoded += int(new.sum())
        forced = int(np.minimum(known_counts, cut.positions).sum())
        report.replayed += forced
        report.replayed_samples += int((np.minimum(known_counts, cut.positions) > 0).sum())
        report.prefilled += forced
        report.began += table.keys(slots[(new > 0) & (before == table.known[slots])])
        accepted = np.minimum(cut.accepted, new)
        # Drafts after the end of a response are not judged.
        judged_drafts = np.where(accepted == new, accepted, drafted[slots])
        report.accepted += int(accepted.sum())
        outcomes = [
            Verified(table.key(int(slot)), int(judged_drafts[at]), int(accepted[at]))
            for at, slot in enumerate(slots)
            if judged_drafts[at]
        ]
        self._complete(state, slots[ended], stopped[ended])
        return outcomes

    def _gathered(
        self, launched: list[Launched], counts: Slots, size: int, report: StepReport, state: EngineState
    ) -> tuple[Slots, npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Wait for several passes; return slots [n], and tokens and log-probabilities [n, most] of their rows."""
        slots = np.concatenate(
            [launch.run.slots[launch.run.rows.ahead == 0] for launch in launched if launch.run.rows is not None]
        )
        line = np.zeros(size, np.int64)
        line[slots] = np.arange(len(slots))
        most = int(counts[slots].max())
        tokens = np.zeros((len(slots), most), np.int64)
        log_probabilities = np.zeros((len(slots), most), np.float32)
        for launch in launched:
            drawn, drawn_log_probabilities = launch.result.wait()
            rows, own = launch.run.rows, line[launch.run.slots]
            assert rows is not None
            tokens[own, rows.ahead] = drawn[: len(own)]
            log_probabilities[own, rows.ahead] = drawn_log_probabilities[: len(own)]
            self._count(state, launch.run.slots[rows.ahead == 0], len(own), launch.run.length, report)
        return slots, tokens, log_probabilities

    def _count(self, state: EngineState, slots: Slots, pass_rows: int, length: int, report: StepReport) -> None:
        report.rows += len(slots)
        report.pass_rows += pass_rows
        report.keys += pass_rows * length
        report.positions += int(state.table.position[slots].sum()) + len(slots)

    def _ended_by_string(
        self,
        state: EngineState,
        slots: Slots,
        before: Slots,
        ended: npt.NDArray[np.bool_],
        stopped: npt.NDArray[np.bool_],
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Shorten responses to the first new token that completes a stop string.

        Return [n] which ended, and [n] which ended by a stop.
        """
        table = state.table
        for at, slot in enumerate(slots):
            tokens = table.tokens(int(slot))
            for end in range(int(before[at]) + 1, len(tokens) + 1):
                by_token = stopped[at] and end == len(tokens)
                if (
                    self.stop.may_complete[tokens[end - 1]]
                    and not by_token
                    and self.stop.ends_with_string(tokens[:end])
                ):
                    table.shorten(int(slot), end)
                    ended[at] = stopped[at] = True
                    break
        return ended, stopped

    def _finish(self, state: EngineState, slots: Slots, sampled: Slots) -> None:
        """Finish the responses that one new token completes."""
        table = state.table
        stopped = self.stop.is_stop[sampled]
        if self.stop.has_strings:
            for at in np.flatnonzero(self.stop.may_complete[sampled] & ~stopped):
                stopped[at] = self.stop.ends_with_string(table.tokens(int(slots[at])))
        ended = stopped | (table.length[slots] >= table.limit[slots])
        self._complete(state, slots[ended], stopped[ended])

    def _complete(self, state: EngineState, slots: Slots, stopped: npt.NDArray[np.bool_]) -> None:
        for slot, stop in zip(slots, stopped, strict=True):
            state.complete.append(state.table.response(int(slot), finish_reason="stop" if stop else "length"))
            if stop and state.turn_cache is not None:
                row = state.pools.row(int(slot))
                state.turn_cache.keep(state.table.key(int(slot)), state.table.sequence(int(slot)), *row)
        self.drafting.tell(state, slots)
        self.free(state, slots)

    def _refuse(self, state: EngineState, slots: Slots, version: int) -> None:
        """Raise EngineError: a policy without finite probabilities must yield no tokens."""
        message = (
            f"{sample_name(state.table.key(int(slots[0])))}: weight version {version} of the actor gives logits that "
            "are not finite; lower spec.training.optimizer.learningRate or go back to an earlier checkpoint"
        )
        raise EngineError("NotFinite", message, "spec.training.optimizer.learningRate")
