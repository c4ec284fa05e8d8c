"""Moves samples with their KV caches away from this worker: the source's side of Migrate, between engine steps.

A sample is decoded while its cache is sent in slices. Rule: this worker owns the sample until the receipt says moved,
and then drops it; otherwise it resumes a paused sample.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import grpc

from rlhf_common import control_pb2 as pb
from rlhf_common.channels import channel
from rlhf_common.samples import SampleKey
from rlhf_workers.failures import describe
from rlhf_workers.generation.engine import Engine, KvMoves, kv_moves_of
from rlhf_workers.generation.migration.kv_transfer import KvTransfer, TransferOutcome
from rlhf_workers.sample_codec import key_message, key_of, progress_message, request_message
from rlhf_workers.worker_role import Outbox

log = logging.getLogger(__name__)

TRANSFERS: Final = 4
"""Maximum concurrent transfers."""
PIECE_BYTES: Final = 16 * 1024 * 1024
"""Maximum bytes of a sample copied between two decode steps, but at least one token."""
BACKLOG: Final = 2
"""Maximum slices of a sample in memory that are not sent yet."""
LAST_TOKENS: Final = 16
"""Number of positions left to send at or below which a sample pauses; it also pauses after ROUNDS."""
ROUNDS: Final = 4
"""Maximum rounds of sending before a sample pauses; decoding may be faster than the link."""
DEFAULT_SECONDS: Final = 60.0
"""Time-out in seconds of a command without one."""
RECEIPT_SECONDS: Final = 10.0
"""Seconds from the pause within which the receipt must come, once the sample is handed over. Until then only the
time-out of the command applies."""


@dataclass
class _Move:
    key: SampleKey
    new_key: SampleKey
    transfer: KvTransfer | None = None
    started: float = 0.0
    start_ns: int = 0
    fed: int = 0
    target: int = 0
    rounds: int = 0
    paused: float = 0.0
    """Monotonic time in seconds when it paused; 0 if it did not."""
    stopped: float = 0.0
    """Seconds that exports took on the compute thread."""
    handed_over: pb.SampleProgress | None = None
    result: pb.MigratedSample | None = None


@dataclass
class _Command:
    identifier: int
    destination: str
    seconds: float
    since: float
    moves: list[_Move]
    outbox: Outbox
    channel: grpc.Channel | None = field(default=None)

    @property
    def left(self) -> float:
        return self.since + self.seconds - time.monotonic()


class OutgoingMigrations:
    """The unanswered Migrate commands of a worker."""

    def __init__(self, engine: Engine, certificates: Path | None, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._engine = engine
        self._kv_moves = kv_moves_of(engine)
        self._certificates = certificates
        self._clock_ns = clock_ns
        self._commands: list[_Command] = []

    def begin(self, identifier: int, command: pb.Migrate, outbox: Outbox) -> None:
        """Take a command; a later `step` or `stop` answers it."""
        moves = [
            _Move(key_of(sample.key), key_of(sample.key)._replace(attempt=sample.new_attempt))
            for sample in command.samples
        ]
        moving = {move.key for _, move in self._open()}
        seconds = command.timeout_seconds or DEFAULT_SECONDS
        self._commands.append(_Command(identifier, command.destination, seconds, time.monotonic(), moves, outbox))
        for move in moves:
            if self._kv_moves is None:
                self._settle(self._commands[-1], move, TransferOutcome(False, "this engine's caches do not move", 0.0))
            elif move.key in moving:
                self._settle(self._commands[-1], move, TransferOutcome(False, "it is already moving", 0.0))
            elif self._kv_moves.cached(move.key) is None:
                self._settle(self._commands[-1], move, TransferOutcome(False, "it is not held here", 0.0))
            moving.add(move.key)

    def step(self) -> bool:
        """Advance every open move, and answer the commands that are settled; return whether a move had work."""
        if not self._commands:
            return False
        worked = False
        for command, move in self._open():
            try:
                worked = self._advance(command, move) or worked
            except Exception as error:
                log.error("sample %s did not move: %s", move.key, describe(error), exc_info=error)
                self._stop(command, move, f"on the source: {describe(error)}")
        self._answer()
        return worked

    def stop(self, keys: Iterable[SampleKey] | None, why: str) -> None:
        """End the transfers of these samples (None: all) as not moved, unless they ended before.

        Answers the commands that this settles.
        """
        wanted = None if keys is None else set(keys)
        for command, move in self._open():
            if wanted is None or move.key in wanted:
                self._stop(command, move, why)
        self._answer()

    # ------------------------------------------------------------ one sample

    def _advance(self, command: _Command, move: _Move) -> bool:
        moves = self._kv_moves
        assert moves is not None
        if move.transfer is None:
            running = sum(1 for _, other in self._open() if other.transfer is not None)
            if moves.cached(move.key) is None:
                self._settle(command, move, TransferOutcome(False, "it was finished meanwhile", 0.0))
            elif command.left <= 0:
                self._settle(command, move, TransferOutcome(False, f"no time left of {command.seconds:g} s", 0.0))
            elif running < TRANSFERS:
                self._offer(command, move, moves)
            else:
                return False
            return True
        outcome = move.transfer.outcome
        if outcome is not None:
            self._settle(command, move, outcome)
            return True
        if move.handed_over is not None:
            if time.monotonic() - move.paused > RECEIPT_SECONDS:
                self._stop(command, move, f"no receipt within {RECEIPT_SECONDS:g} s of the pause")
            return False
        cached = moves.cached(move.key)
        if cached is None:
            self._stop(command, move, "it was finished meanwhile")
            return True
        if cached < move.fed:
            self._stop(command, move, "its cache was given up for other samples meanwhile")
            return True
        return self._feed(move, move.transfer, cached, moves)

    def _offer(self, command: _Command, move: _Move, moves: KvMoves) -> None:
        if command.channel is None:
            command.channel = channel(command.destination, self._certificates)
        request = replace(moves.carried(move.key), key=move.new_key)
        offer = pb.KvOffer(sample=request_message(request), version=self._engine.version, layout=moves.layout)
        move.started, move.start_ns = time.monotonic(), self._clock_ns()
        move.transfer = KvTransfer(command.channel, offer, max(command.left, 0.001))

    def _feed(self, move: _Move, transfer: KvTransfer, cached: int, moves: KvMoves) -> bool:
        """Pause the sample if it is time, and send the next slice, the hand-over or both; return whether it could."""
        if not transfer.taken or transfer.backlog >= BACKLOG:
            return False
        if move.fed == move.target and not move.paused:
            if transfer.backlog:
                return False  # it is decoded until the earlier slices are sent
            left = cached - move.fed
            if left <= LAST_TOKENS or move.rounds >= ROUNDS:
                moves.pause(move.key, True)
                move.paused = time.monotonic()
            move.target = cached
            move.rounds += 1
        if move.fed < move.target:
            tokens = max(PIECE_BYTES // moves.bytes_per_token, 1)
            stop = min(move.fed + tokens, move.target)
            began = time.monotonic()
            transfer.send(moves.export(move.key, move.fed, stop))
            move.stopped += time.monotonic() - began
            move.fed = stop
        if move.paused and move.fed == move.target:
            progress = progress_message(replace(moves.carried(move.key), key=move.new_key))
            move.handed_over = progress
            transfer.hand_over(pb.KvHandOver(sample=progress, positions=move.fed))
        return True

    def _stop(self, command: _Command, move: _Move, why: str) -> None:
        """End a move now; an earlier outcome counts."""
        if move.transfer is not None and not move.transfer.cancel(why):
            outcome = move.transfer.outcome
            assert outcome is not None
            self._settle(command, move, outcome)
        else:
            self._settle(command, move, TransferOutcome(False, why, time.monotonic()))

    def _settle(self, command: _Command, move: _Move, outcome: TransferOutcome) -> None:
        if outcome.moved and move.handed_over is None:
            outcome = replace(outcome, moved=False, why="the destination answered before the sample was handed over")
        result = move.result = pb.MigratedSample(key=key_message(move.key), moved=outcome.moved, why=outcome.why)
        if move.handed_over is not None and outcome.moved:
            self._engine.withdraw([move.key])
            result.progress.CopyFrom(move.handed_over)
        elif move.paused and self._kv_moves is not None:
            self._kv_moves.pause(move.key, False)
        if move.transfer is None:
            return
        result.bytes = move.transfer.bytes
        result.seconds = max(outcome.at - move.started, 0.0)
        result.paused_seconds = max(outcome.at - move.paused, 0.0) if move.paused else 0.0
        command.outbox.moved("kv_cache_out", result.bytes, result.seconds)
        command.outbox.span(
            "migrate",
            move.start_ns,
            move.start_ns + int(result.seconds * 1e9),
            move.key.iteration,
            direction="out",
            peer=command.destination,
            sample=str(move.key.sample),
            bytes=str(result.bytes),
            paused_seconds=f"{result.paused_seconds:.4f}",
            stopped_seconds=f"{move.stopped:.6f}",
            **({} if outcome.moved else {"not_moved": outcome.why}),
        )

    # ------------------------------------------------------------ commands

    def _open(self) -> list[tuple[_Command, _Move]]:
        return [(command, move) for command in self._commands for move in command.moves if move.result is None]

    def _answer(self) -> None:
        """Answer the commands whose samples are all settled."""
        for command in list(self._commands):
            results = [move.result for move in command.moves if move.result is not None]
            if len(results) < len(command.moves):
                continue
            self._commands.remove(command)
            if command.channel is not None:
                command.channel.close()
            answer = pb.MigrateResult(samples=results)
            command.outbox.done(pb.CommandDone(command_id=command.identifier, migrate=answer))
