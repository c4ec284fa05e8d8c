"""The sample handling of a simulated worker: decoding, withdrawal, migration to a peer, scoring.

Tokens are a function of (random key, position), scores of the tokens. A peer is found by its address.
"""

import asyncio
from dataclasses import dataclass
from typing import ClassVar

from tests.support.coordinator.simulated_rank import Pace
from tests.support.coordinator.simulated_results import response, response_length, score, seed_of

from rlhf_api.score_blocks import BLOCK, whole_blocks
from rlhf_common import control_pb2 as pb


@dataclass
class _Decoding:
    message: pb.GenerateSample
    length: int
    position: int
    reported: int
    paused: bool = False


class SimulatedSamples:
    """The samples of a simulated worker."""

    _peers: ClassVar[dict[str, "SimulatedSamples"]] = {}
    """(coordinator, address) -> worker to which KV caches are sent."""

    name: str
    coordinator: str
    pace: Pace
    roles: set[str]
    versions: dict[str, int]
    decoded: dict[tuple[int, int], list[int]]
    """(iteration, sample) -> positions at which it arrived, in order."""
    scored: list[tuple[int, int, str]]
    """(iteration, sample, task) of every reported score."""

    prefixes: int
    """Number of requested prefixes, over all its processes."""

    def kill(self) -> None:
        """Let the process die and start a new one."""
        raise NotImplementedError

    def _hold_nothing(self) -> None:
        self._begun: dict[tuple[int, int], bytes] = {}
        self._decoding: dict[tuple[int, int], _Decoding] = {}
        self._scores: list[tuple[pb.ScoreSample, str]] = []
        self._to_score: list[tuple[pb.ScoreSample, str]] = []
        self._scored_until = 0.0
        self._tries: dict[tuple[int, int, str], int] = {}
        self._outbox: list[pb.WorkerMessage] = []
        self._tokens = 0

    def _on_generate(self, order: pb.Generate, done: pb.CommandDone) -> None:
        for sample in order.samples:
            seed = seed_of(sample.random_key, sample.prompt.data, sample.drawing)
            length = response_length(seed, sample.max_response_tokens)
            tokens = len(sample.tokens.data) // 4
            self._take(_Decoding(sample, length, tokens, tokens))

    def _on_withdraw(self, order: pb.Withdraw, done: pb.CommandDone) -> None:
        for key in order.keys:
            item = self._decoding_sample(key)
            if item is not None:
                done.withdraw.samples.append(self._progress(item, 0))
                del self._decoding[key.iteration, key.sample]

    def _take(self, item: _Decoding) -> None:
        place = (item.message.key.iteration, item.message.key.sample)
        self._decoding[place] = item
        self.decoded.setdefault(place, []).append(item.position)

    def _decoding_sample(self, key: pb.SampleKey) -> _Decoding | None:
        item = self._decoding.get((key.iteration, key.sample))
        return item if item is not None and item.message.key == key else None

    def _decode(self, *, report: bool) -> None:
        for key, item in list(self._decoding.items()):
            fault = self.pace.fail_decode(self.name, item.message.key) if self.pace.fail_decode is not None else None
            if fault == "crashed":
                self._outbox.clear()
                self.kill()
                return
            if fault == "refused":
                broken = pb.FailedSample(key=item.message.key, progress=self._progress(item, 0))
                broken.failure.message = "its prompt breaks the engine"
                self._outbox.append(pb.WorkerMessage(failed=broken))
                del self._decoding[key]
                continue
            before = item.position
            item.position = min(item.length, item.position + (0 if item.paused else self.pace.tokens_per_tick))
            self._tokens += item.position - before
            if item.position == item.length:
                whole = self._progress(item, 0)
                finished = pb.FinishedSample(
                    key=item.message.key,
                    tokens=whole.tokens,
                    log_probabilities=whole.log_probabilities,
                    versions=whole.versions,
                    finish_reason="stop",
                    text=f"response of {item.length}",
                    queue_seconds=self.pace.tick_seconds,
                )
                self._outbox.append(pb.WorkerMessage(finished=finished))
                del self._decoding[key]
            elif report:
                self._outbox.append(pb.WorkerMessage(progress=self._progress(item, item.reported)))
                item.reported = item.position

    def _progress(self, item: _Decoding, start: int) -> pb.SampleProgress:
        message = item.message
        seed = seed_of(message.random_key, message.prompt.data, message.drawing)
        tokens, log_probabilities = response(seed, start, item.position)
        count = item.position - start
        return pb.SampleProgress(
            key=message.key,
            offset=start,
            tokens=pb.Array(dtype="int32", shape=[count], data=tokens),
            log_probabilities=pb.Array(dtype="float32", shape=[count], data=log_probabilities),
            versions=[pb.VersionSpan(version=self.versions["actor"], tokens=count)],
        )

    async def _migrate(self, command_id: int, order: pb.Migrate) -> None:
        await asyncio.sleep(self.pace.transfer_seconds)
        done = pb.CommandDone(command_id=command_id)
        for sample in order.samples:
            reported = done.migrate.samples.add(key=sample.key, seconds=self.pace.transfer_seconds)
            item, destination = (
                self._decoding_sample(sample.key),
                self._peers.get(f"{self.coordinator}/{order.destination}"),
            )
            fault = self.pace.fail_migrate(self.name, sample) if self.pace.fail_migrate is not None else None
            if item is None or destination is None or "generation" not in destination.roles or fault == "refused":
                reported.why = "finished" if item is None else "refused"
                continue
            message = pb.GenerateSample()
            message.CopyFrom(item.message)
            message.key.attempt = sample.new_attempt
            moved = _Decoding(message, item.length, item.position, item.position)
            destination._take(moved)
            if fault != "unheard":
                item.paused = True
                if self.pace.receipt_seconds:
                    await asyncio.sleep(self.pace.receipt_seconds)
                if self._decoding_sample(sample.key) is not item:
                    reported.why = "it was withdrawn"
                    continue
                del self._decoding[sample.key.iteration, sample.key.sample]
                reported.moved, reported.bytes = True, 100 * item.position
                reported.progress.CopyFrom(destination._progress(moved, 0))
        self._outbox.append(pb.WorkerMessage(done=done))

    def _on_score_prefix(self, order: pb.ScorePrefix, done: pb.CommandDone) -> None:
        assert all(task == "reward" for _, task in self._to_score), (
            "asked to begin with unfinished samples while finished ones wait"
        )
        for sample in order.samples:
            self.prefixes += 1
            place, tokens = (sample.key.iteration, sample.key.sample), sample.response.data
            assert set(sample.tasks) <= {"reference", "values"}
            assert tokens.startswith(self._begun.get(place, b"")), "a response went on with other tokens"
            positions = len(sample.prompt.data + tokens) // 4
            self._begun[place] = tokens
            scored_prefix = pb.ScoredPrefix(
                key=sample.key, tokens=whole_blocks(positions) * BLOCK, cache_bytes=100 * positions
            )
            if len(self._begun) > self.pace.most_prefixes:
                other = next(iter(self._begun))
                del self._begun[other]
                scored_prefix.dropped.append(other[1])
                scored_prefix.tokens *= other != place
            self._outbox.append(pb.WorkerMessage(prefix=scored_prefix))

    def _on_score(self, order: pb.Score, done: pb.CommandDone) -> None:
        pairs = [(sample, task) for sample in order.samples for task in sample.tasks]
        if self.pace.score_seconds or self.pace.token_seconds:
            self._to_score += pairs
        else:
            self._scores += pairs

    def _score(self) -> None:
        for sample, task in self._scores:
            self._outbox.append(pb.WorkerMessage(scored=self._scored(sample, task)))
        self._scores.clear()

    def _score_slowly(self, now: float) -> None:
        """Report the scores one after the other, `score_seconds` apart."""
        while self._to_score and now >= self._scored_until:
            sample, task = self._to_score.pop(0)
            reported = self._scored(sample, task)
            tokens = len(sample.prompt.data + sample.response.data) // 4 - reported.early_tokens
            seconds = self.pace.score_seconds + tokens * self.pace.token_seconds
            self._scored_until = max(self._scored_until, now - self.pace.tick_seconds) + seconds
            self._outbox.append(pb.WorkerMessage(scored=reported))
            if self.pace.token_seconds:
                observation = pb.Observation(end_ns=int(1e9 * seconds), iteration=sample.key.iteration)
                observation.scoring.CopyFrom(pb.ScoringObservation(task=task, samples=1, tokens=tokens))
                self._outbox.append(pb.WorkerMessage(observation=observation))

    def _scored(self, sample: pb.ScoreSample, task: str) -> pb.ScoredSample:
        tries = (sample.key.iteration, sample.key.sample, task)
        self._tries[tries] = self._tries.get(tries, 0) + 1
        if self.pace.fail_score is not None:
            instead = self.pace.fail_score(sample, task, self._tries[tries] - 1)
            if instead is not None:
                return instead
        self.scored.append((sample.key.iteration, sample.key.sample, task))
        data = score(task, sample.response.data)
        result = pb.Array(dtype="float32", shape=[len(data) // 4], data=data)
        begun = self._begun.get(tries[:2], b"") if task != "reward" else b""
        early = whole_blocks(len(sample.prompt.data + begun) // 4) * BLOCK
        assert sample.response.data.startswith(begun), "a response ended with other tokens"
        return pb.ScoredSample(key=sample.key, task=task, result=result, early_tokens=early)
