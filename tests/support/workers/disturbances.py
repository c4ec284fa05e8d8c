"""Moves samples between engines at random moments, and compares with an undisturbed engine.

Rule: all randomness comes from one seed, so that a failure can be repeated by its number. Every submitted sample comes
back finished exactly once. The disturbances are counted, so that a test can check that they happened. Depends on the
Protocols of engines only.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace

import numpy as np
import torch
from tests.support.model_folders.models import SPECIAL, VOCABULARY
from tests.support.workers.engine_driving import resumed

from rlhf_common.samples import ResponsePart, SampleKey, SampleRequest
from rlhf_workers.generation.engine import Engine, kv_moves_of
from rlhf_workers.models.kv_slices import KvSlice

COMMON_PREFIX = 37
"""Tokens of the common prefix: more than a block of a paged cache, so that a prefix cache can share it."""
MOST_TURNS = 20_000
"""Bound of the turns, many times what any of these runs takes."""


@dataclass
class Happened:
    """Counts of the disturbances."""

    withdrawn: int = 0
    resumed: int = 0
    """Samples submitted with tokens that they already had."""
    changed_engines: int = 0
    """Samples submitted to another engine than they were withdrawn from."""
    moved: int = 0
    """Samples admitted elsewhere with their caches, after the source had decoded more tokens."""
    steps: int = 0

    def __add__(self, other: "Happened") -> "Happened":
        """Return the counts of both runs."""
        return Happened(*(count + more for count, more in zip(astuple(self), astuple(other), strict=True)))


def sharing_prompts(count: int, *, seed: int, longest: int, response: int) -> list[SampleRequest]:
    """Return samples of which some share a prefix of COMMON_PREFIX tokens and some the prompt; keys are random."""
    random = np.random.default_rng(seed)
    common = random.integers(len(SPECIAL), VOCABULARY, COMMON_PREFIX)
    prompts: list[np.ndarray] = []
    for _ in range(count):
        kind = random.integers(3)
        if kind == 0 and prompts:
            prompts.append(prompts[random.integers(len(prompts))])
        elif kind == 1:
            prompts.append(random.integers(len(SPECIAL), VOCABULARY, random.integers(1, longest + 1)))
        else:
            rest = random.integers(len(SPECIAL), VOCABULARY, random.integers(1, longest - COMMON_PREFIX + 1))
            prompts.append(np.concatenate([common, rest]))
    return [
        SampleRequest(
            SampleKey(0, number, 0),
            prompt.astype(np.int32),
            int(random.integers(2**64, dtype=np.uint64)),
            int(random.integers(1, response + 1)),
        )
        for number, prompt in enumerate(prompts)
    ]


@dataclass
class _Held:
    """A sample in an engine."""

    engine: int
    tokens: list[int]
    """Tokens with which it was submitted, and those that `progress` has reported since."""
    moving_to: int = -1
    copied: KvSlice | None = None
    """Prefix of its cache that was copied while it is decoded further."""


@dataclass
class Disturbed:
    """Engines over the same weights, and the samples that move between them."""

    engines: Sequence[Engine]
    random: np.random.Generator
    happened: Happened = field(default_factory=Happened)
    _requests: dict[int, SampleRequest] = field(default_factory=dict)
    _waiting: list[tuple[SampleRequest, int]] = field(default_factory=list)
    """Samples without an engine, with their last engine; -1: none."""
    _held: dict[SampleKey, _Held] = field(default_factory=dict)
    _done: dict[int, ResponsePart] = field(default_factory=dict)

    def run(self, samples: Sequence[SampleRequest]) -> dict[int, ResponsePart]:
        """Return whole responses by sample number, each finished once."""
        self._requests = {sample.key.sample: sample for sample in samples}
        self._waiting = [(sample, -1) for sample in samples]
        for _ in range(MOST_TURNS):
            if len(self._done) == len(samples):
                break
            self._hand_out()
            self._step()
            self._finish_moves()
            for share, act in ((0.25, self._report), (0.15, self._withdraw), (0.15, self._begin_move)):
                if self.random.random() < share:
                    act()
        assert sorted(self._done) == sorted(self._requests), "a sample was lost"
        assert not any(engine.in_flight for engine in self.engines)
        return self._done

    def _hand_out(self) -> None:
        """Submit some waiting samples, in any order, to any engine; all of them if no engine decodes."""
        if not self._waiting or (self._held and self.random.random() < 0.7):
            return
        count = int(self.random.integers(1, len(self._waiting) + 1)) if self._held else len(self._waiting)
        order = self.random.permutation(len(self._waiting))
        lot = [self._waiting[index] for index in order[:count]]
        self._waiting = [self._waiting[index] for index in order[count:]]
        chosen = int(self.random.integers(len(self.engines)))
        self.engines[chosen].submit([request for request, _ in lot])
        for request, last in lot:
            self._held[request.key] = _Held(chosen, request.tokens.tolist())
            self.happened.resumed += len(request.tokens) > 0
            self.happened.changed_engines += last not in (-1, chosen)

    def _step(self) -> None:
        for engine in self.engines:
            if not engine.in_flight or self.random.random() < 0.2:
                continue
            report = engine.step()
            self.happened.steps += 1
            for response in report.finished:
                sample = self._held.pop(response.key)  # a KeyError: finished twice, or withdrawn before
                self._check_known(sample, response)
                self._give_up_move(sample)
                self._done[response.key.sample] = response

    def _report(self) -> None:
        for engine in self.engines:
            for part in engine.progress():
                sample, tokens = self._held[part.key], part.tokens.tolist()
                again = len(sample.tokens) - part.offset
                assert 0 <= again <= len(tokens), f"{part.key}: a gap, or tokens that were taken back"
                assert sample.tokens[part.offset :] == tokens[:again]
                sample.tokens += tokens[again:]

    def _withdraw(self) -> None:
        """Withdraw some samples, or all, from an engine, including moving ones."""
        source = int(self.random.integers(len(self.engines)))
        keys = [key for key, sample in self._held.items() if sample.engine == source]
        if not keys:
            return
        count = int(self.random.integers(1, len(keys) + 1))
        chosen = [keys[index] for index in self.random.permutation(len(keys))[:count]]
        parts = self.engines[source].withdraw(chosen)
        assert {part.key for part in parts} == set(chosen), "what an engine holds can be withdrawn"
        self.happened.withdrawn += len(parts)
        for part in parts:
            sample = self._held.pop(part.key)
            self._check_known(sample, part)
            self._give_up_move(sample)
            self._waiting.append((resumed(self._requests[part.key.sample], part), source))

    def _begin_move(self) -> None:
        """Copy the present cache of a sample to another engine that accepts it and has room; decoding continues."""
        keys = [key for key, sample in self._held.items() if sample.moving_to < 0]
        if len(self.engines) < 2 or not keys:
            return
        key = keys[self.random.integers(len(keys))]
        sample = self._held[key]
        others = [number for number in range(len(self.engines)) if number != sample.engine]
        destination = others[self.random.integers(len(others))]
        source, other = (kv_moves_of(self.engines[number]) for number in (sample.engine, destination))
        if source is None or other is None or source.layout != other.layout or not other.reserve():
            return
        cached = source.cached(key)
        assert cached is not None
        sample.moving_to = destination
        sample.copied = source.export(key, 0, cached) if cached else None

    def _finish_moves(self) -> None:
        """Pause samples whose prefix was copied, send the additions to their caches, and resume them elsewhere."""
        for key, sample in list(self._held.items()):
            if sample.moving_to < 0 or self.random.random() < 0.6:
                continue
            source, other = (kv_moves_of(self.engines[number]) for number in (sample.engine, sample.moving_to))
            assert source is not None
            assert other is not None
            source.pause(key, True)
            cached = source.cached(key)
            assert cached is not None
            copied = sample.copied.stop if sample.copied else 0
            parts = [sample.copied] if sample.copied else []
            parts += [source.export(key, copied, cached)] if cached > copied else []
            moved = replace(source.carried(key), key=key._replace(attempt=key.attempt + 1))
            other.admit(moved, joined(parts) if parts else None)
            (left,) = self.engines[sample.engine].withdraw([key])
            assert left.tokens.tolist() == moved.tokens.tolist()
            self._held[moved.key] = _Held(sample.moving_to, moved.tokens.tolist())
            del self._held[key]
            self.happened.moved += 1

    def _give_up_move(self, sample: _Held) -> None:
        if sample.moving_to >= 0:
            moves = kv_moves_of(self.engines[sample.moving_to])
            assert moves is not None
            moves.release()

    def _check_known(self, sample: _Held, part: ResponsePart) -> None:
        assert part.tokens.tolist()[: len(sample.tokens)] == sample.tokens, f"{part.key}: reported tokens were changed"
        assert sum(span.tokens for span in part.versions) == len(part.tokens) == len(part.log_probabilities)


def joined(parts: Sequence[KvSlice]) -> KvSlice:
    """Return consecutive slices as one."""
    for part in parts:
        part.ready()
    layers = tuple(
        tuple(torch.cat([part.layers[layer][kind] for part in parts], dim=1) for kind in (0, 1))
        for layer in range(len(parts[0].layers))
    )
    return KvSlice(parts[0].start, parts[-1].stop, layers)  # type: ignore[arg-type]
