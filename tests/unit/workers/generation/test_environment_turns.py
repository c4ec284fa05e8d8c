"""Turns: the author of each token, the continuation after an answer, and no effect of interruptions."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.model_folders.models import SPECIAL, VOCABULARY, build_tokenizer
from tests.support.workers.engine_driving import MakeEngine, finish, requests, resumed, same_bits
from transformers import AddedToken

from rlhf_common import control_pb2 as pb
from rlhf_common.samples import NOT_SAMPLED, Episode, ResponsePart, SampleKey, SampleRequest, VersionSpan
from rlhf_workers.generation.engine import EngineError, MeasuresCosts, MovesKvCaches, Sleeps
from rlhf_workers.generation.environment.environment_calls import EnvironmentCalls, EnvironmentOutcome
from rlhf_workers.generation.environment.environment_engine import DecodesTurns, EnvironmentEngine
from rlhf_workers.generation.environment.turns import AnsweredTurn, episode_of, following, written
from rlhf_workers.sample_codec import finished_message, request_message, request_of

KEY = SampleKey(0, 3, 1)
STOPS = tuple(range(len(SPECIAL), VOCABULARY, 6))
"""Stop tokens, so many that turns of a random policy are short."""


def response(turn: Sequence[int], reason: str = "stop", *, written_by_environment: int = 0) -> ResponsePart:
    tokens = np.array(turn, np.int32)
    numbers = np.full(len(tokens), -1.0, np.float32)
    if written_by_environment:
        numbers[2 : 2 + written_by_environment] = NOT_SAMPLED
    return ResponsePart(KEY, 0, tokens, numbers, (VersionSpan(0, len(tokens)),), reason)  # type: ignore[arg-type]


def step(message: str = "x", *, done: bool = False, reward: float | None = None) -> AnsweredTurn:
    return AnsweredTurn(message, done, reward, {})


@given(st.lists(st.integers(1, 5), max_size=6))
def test_turns_and_answers_are_read_from_the_log_probabilities(lengths: list[int]) -> None:
    tokens = np.arange(sum(lengths), dtype=np.int32)
    owners = np.repeat(np.arange(len(lengths)) % 2, lengths)
    found = written(tokens, np.where(owners == 1, NOT_SAMPLED, -0.5).astype(np.float32))
    assert [len(turn) for turn in found.turns] == lengths[::2]
    assert [len(answer) for answer in found.answers] == lengths[1::2]
    parts = [part for pair in zip(found.turns, (*found.answers, tokens[:0]), strict=False) for part in pair]
    assert np.concatenate([tokens[:0], *parts]).tolist() == tokens.tolist()


def after(
    turn: ResponsePart, steps: Sequence[AnsweredTurn], *, answer: int = 2, longest: int = 10
) -> ResponsePart | SampleRequest:
    request = SampleRequest(KEY, np.array([1], np.int32), 7, longest, record="{}")
    return following(request, turn, np.full(answer, 9, np.int32), steps, 3, 0)


def test_an_answer_is_appended_and_has_no_log_probability() -> None:
    request = after(response([5, 6]), [step()])
    assert isinstance(request, SampleRequest)
    assert request.tokens.tolist() == [5, 6, 9, 9]
    assert request.log_probabilities.tolist() == [-1, -1, NOT_SAMPLED, NOT_SAMPLED]
    assert (request.versions, request.record, request.random_key) == ((VersionSpan(0, 4),), "{}", 7)


@pytest.mark.parametrize(
    ("turn", "steps", "longest", "reason"),
    [
        (response([5, 6]), [step(done=True)], 10, "stop"),
        (response([5, 6], "length"), [step(done=True)], 2, "length"),
        (response([5, 6], "length"), [step()], 2, "length"),
        (response([5, 6]), [step(), step(), step()], 10, "length"),
        (response([5, 6]), [step()], 4, "length"),
    ],
)
def test_a_response_ends_where_nothing_can_follow(
    turn: ResponsePart, steps: Sequence[AnsweredTurn], longest: int, reason: str
) -> None:
    ended = after(turn, steps, longest=longest)
    assert isinstance(ended, ResponsePart)
    assert (ended.finish_reason, ended.tokens.tolist()) == (reason, [5, 6])
    assert ended.episode is not None
    assert ended.episode.turns == len(steps)


def test_rewards_are_added_up_and_none_at_all_abstains() -> None:
    steps = [
        AnsweredTurn("a", False, None, {"calls": 1.0}),
        AnsweredTurn("b", False, 0.25, {}),
        AnsweredTurn("", True, 1.0, {"calls": 2.0}),
    ]
    assert episode_of(steps) == Episode(3, 1.25, {"calls": 3.0})
    assert episode_of([step(), step(done=True)]).reward is None


def test_what_travels_says_who_wrote_what() -> None:
    request = after(response([5, 6]), [step()])
    assert isinstance(request, SampleRequest)
    again = request_of(pb.GenerateSample.FromString(request_message(request).SerializeToString()))
    assert again.log_probabilities.tolist() == request.log_probabilities.tolist()
    assert again.record == "{}"
    ended = after(response([5, 6]), [step(done=True, reward=None)])
    assert isinstance(ended, ResponsePart)
    message = finished_message(ended, "text")
    assert (message.episode.turns, message.episode.abstained) == (1, True)


class Counter:
    """Answers a turn some steps later with two tokens that depend on all turns; done after three turns."""

    def __init__(self, late: int = 0, fail: str = "") -> None:
        self.late, self.fail, self.closed = late, fail, False
        self.asked: list[tuple[int, SampleKey, list[str]]] = []
        self._now = 0

    def submit(self, key: SampleKey, record: str, turns: Sequence[str]) -> None:
        self.asked.append((self._now + 1 + self.late * (key.sample % 3), key, list(turns)))

    def collect(self) -> list[EnvironmentOutcome]:
        self._now += 1
        due = [call for call in self.asked if call[0] <= self._now]
        self.asked = [call for call in self.asked if call[0] > self._now]
        return [self._outcome(key, turns) for _, key, turns in due]

    def forget(self, key: SampleKey) -> None:
        self.asked = [call for call in self.asked if call[1] != key]

    def close(self) -> None:
        self.closed = True

    def _outcome(self, key: SampleKey, turns: list[str]) -> EnvironmentOutcome:
        if self.fail:
            return EnvironmentOutcome(key, (), pb.Failure(reason="EnvironmentRaised", message=self.fail, field="f"))
        said = ["".join(turns[: number + 1]) for number in range(len(turns))]
        steps = tuple(
            AnsweredTurn(f"{len(text) % 7 + 10}", number == 2, float(len(text)), {}) for number, text in enumerate(said)
        )
        return EnvironmentOutcome(key, steps, None)


class NumberedTokens:
    """A tokenizer with two tokens per answer; the second ends turns of the policy."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [len(SPECIAL) + 1 + int(text), STOPS[0]]

    def decode(self, tokens: list[int], *, skip_special_tokens: bool, **_: bool) -> str:
        assert not skip_special_tokens
        return " ".join(map(str, tokens))


class Chat(Counter):
    """An environment that answers with messages."""

    def _outcome(self, key: SampleKey, turns: list[str]) -> EnvironmentOutcome:
        outcome = super()._outcome(key, turns)
        steps = [
            replace(step, message="", messages=({"role": "tool", "content": step.message},)) for step in outcome.steps
        ]
        return replace(outcome, steps=tuple(steps))


class ChatTokens(NumberedTokens):
    """Tokens of a policy whose template ends turns with any of the stop tokens."""

    chat_template = "a template"

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], **arguments: object) -> str:
        assert arguments == {"tokenize": False, "add_generation_prompt": True}
        return "".join(f"{message['content']}<end>" for message in messages).removesuffix("<end>")

    def decode(self, tokens: list[int], *, skip_special_tokens: bool, **text: bool) -> str:
        return super().decode(tokens, skip_special_tokens=skip_special_tokens) if text else "<end>"


def environed(
    make_engine: MakeEngine,
    calls: Counter | None = None,
    *,
    keeps_cache: bool = False,
    tokenizer: NumberedTokens | None = None,
    **options: object,
) -> EnvironmentEngine:
    engine = make_engine(stop_token_ids=STOPS, **options)
    assert isinstance(engine, DecodesTurns)
    if keeps_cache:
        engine.keep_turns()
    counter: EnvironmentCalls = calls or Counter()
    return EnvironmentEngine(engine, counter, tokenizer or NumberedTokens(), max_turns=5)


class Remembering(Counter):
    """Records the turns of every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: dict[int, list[str]] = {}

    def submit(self, key: SampleKey, record: str, turns: Sequence[str]) -> None:
        super().submit(key, record, turns)
        self.turns[key.sample] = list(turns)


def test_the_environment_sees_special_tokens_of_a_turn_but_not_its_end(make_engine: MakeEngine) -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken(letter, special=True) for letter in "0123456789abcdefghijklm"])
    engine, calls = make_engine(slots=4, stop_token_ids=STOPS), Remembering()
    assert isinstance(engine, DecodesTurns)
    environment: Any = calls
    done = finish(EnvironmentEngine(engine, environment, tokenizer, max_turns=1, ends=frozenset(STOPS)), requests(4))
    for number, response in done.items():
        letters = tokenizer.convert_ids_to_tokens(response.tokens.tolist())
        assert calls.turns[number] == ["".join(letters[:-1])]
        assert response.tokens[-1] in STOPS


def by_number(samples: Sequence[SampleRequest]) -> Mapping[int, SampleRequest]:
    return {sample.key.sample: sample for sample in samples}


def test_a_response_of_several_turns_has_the_environments_tokens_between_them(make_engine: MakeEngine) -> None:
    engine = environed(make_engine, Counter(late=2))
    assert isinstance(engine, Sleeps)
    assert isinstance(engine, MeasuresCosts)
    assert not isinstance(engine, MovesKvCaches)
    done = finish(engine, requests(12, response=60))
    assert len(done) == 12
    ended = [response for response in done.values() if response.finish_reason == "stop"]
    assert ended
    for response in ended:
        parts = written(response.tokens, response.log_probabilities)
        assert (len(parts.turns), len(parts.answers)) == (3, 2)
        assert all(turn[-1] in STOPS or turn[-1] < len(SPECIAL) for turn in parts.turns)
        assert all(answer[-1] == STOPS[0] for answer in parts.answers)
        assert response.episode is not None
        assert response.episode.turns == 3
    assert engine.in_flight == 0


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("keeps_cache", [True, False])
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_response_is_the_same_wherever_it_was_interrupted(
    make_engine: MakeEngine, *, deterministic: bool, keeps_cache: bool
) -> None:
    samples = requests(10, response=60)
    wanted = finish(environed(make_engine, deterministic=deterministic), samples)
    moves, done, numbered = random.Random(5), {}, by_number(samples)  # type: ignore[var-annotated]
    engines = [
        environed(make_engine, Counter(late=3), keeps_cache=keeps_cache, deterministic=deterministic) for _ in range(2)
    ]
    engines[0].submit(samples)
    while any(engine.in_flight for engine in engines):
        for engine, other in (engines, engines[::-1]):
            done |= {response.key.sample: response for response in (engine.step().finished if engine.in_flight else ())}
            if engine.in_flight and moves.random() < 0.3:
                key = moves.choice(sorted(engine._requests))
                other.submit([resumed(numbered[part.key.sample], part) for part in engine.withdraw([key])])
    assert done.keys() == wanted.keys()
    for number, response in done.items():
        assert response.tokens.tolist() == wanted[number].tokens.tolist()
        assert response.episode == wanted[number].episode
        assert not deterministic or same_bits(response, wanted[number])


def test_messages_are_appended_as_the_chat_template_writes_them(make_engine: MakeEngine) -> None:
    """Also when interrupted and moved: the answer is rebuilt from the messages, and compared."""
    samples = requests(8, response=60)
    wanted = finish(environed(make_engine, Counter()), samples)
    engines = [environed(make_engine, Chat(), tokenizer=ChatTokens()) for _ in range(2)]
    engines[0].submit(samples)
    for _ in range(12):
        engines[0].step()
    before = {part.key.sample: part for part in engines[0].withdraw()}
    assert any(NOT_SAMPLED in part.log_probabilities for part in before.values())
    done = finish(engines[1], [resumed(samples[number], part) for number, part in before.items()])
    for number, part in done.items():
        assert part.tokens.tolist() == wanted[number].tokens.tolist()


def driven(engine: EnvironmentEngine, samples: Sequence[SampleRequest]) -> tuple[dict[int, ResponsePart], int, int]:
    """Return responses by sample, and the numbers of known tokens that the model processed and that were cached."""
    done: dict[int, ResponsePart] = {}
    processed = reused = 0
    engine.submit(samples)
    while engine.in_flight:
        report = engine.step()
        done |= {response.key.sample: response for response in report.finished}
        processed, reused = processed + report.prefilled, reused + report.reused
    return done, processed, reused


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
@pytest.mark.parametrize("options", [{"deterministic": True}, {"deterministic": False}, {"static_shapes": True}])
def test_a_cache_that_is_kept_between_turns_changes_no_response(
    make_engine: MakeEngine, family: str, options: dict[str, Any]
) -> None:
    """Ten samples in slots for four: samples that wait for an answer take none."""
    options = {"architecture": family, "slots": 4, **options}
    samples = requests(10, response=60)
    wanted, all_known, none = driven(environed(make_engine, Counter(late=2), **options), samples)
    done, processed, reused = driven(environed(make_engine, Counter(late=2), keeps_cache=True, **options), samples)
    assert none == 0
    assert reused > 0
    assert processed < all_known
    assert done.keys() == wanted.keys()
    for number, response in done.items():
        assert response.tokens.tolist() == wanted[number].tokens.tolist()
        assert response.episode == wanted[number].episode
        assert not options.get("deterministic") or same_bits(response, wanted[number])


@pytest.mark.parametrize("how", ["weights", "sleep"])
def test_what_is_kept_goes_with_the_weights(make_engine: MakeEngine, how: str) -> None:
    """A turn from other weights is computed again after an update; so are the caches of others."""
    inner = make_engine(stop_token_ids=STOPS, deterministic=True)
    assert isinstance(inner, DecodesTurns)
    inner.keep_turns()
    samples = requests(6, response=60)
    ended = finish(inner, samples)
    again = [resumed(samples[number], part) for number, part in ended.items() if part.finish_reason == "stop"]
    longer = [replace_tokens(request) for request in again if len(request.tokens) < 50]
    assert longer
    if how == "weights":
        weights = {name: tensor.clone() for name, tensor in inner._model.state_dict().items()}
        inner.load_weights(weights, 0)
    else:
        inner.sleep()
        inner.wake()
    inner.submit(longer)
    report = inner.step()
    assert (report.reused, report.prefilled > 0) == (0, True)


def test_a_turn_that_a_sample_cannot_continue_is_not_stored(make_engine: MakeEngine) -> None:
    inner = make_engine(stop_token_ids=STOPS, deterministic=True)
    assert isinstance(inner, DecodesTurns)
    inner.keep_turns()
    samples = requests(6, response=60)
    stopped = [part for part in finish(inner, samples).values() if part.finish_reason == "stop"]
    cached = inner._state.turn_cache
    assert stopped
    assert cached is not None
    for part in stopped:
        assert len(cached.take(part.key).sequence) > 1
    finish(inner, samples)
    inner.submit([samples[part.key.sample] for part in stopped])  # from their prompts again
    for part in stopped:
        with pytest.raises(KeyError):
            cached.take(part.key)


def replace_tokens(request: SampleRequest) -> SampleRequest:
    """Return the request with an answer of one token at the end."""
    after = following(
        request,
        ResponsePart(request.key, 0, request.tokens, request.log_probabilities, request.versions, "stop"),
        np.full(1, STOPS[0] + 1, np.int32),
        [step()],
        9,
        0,
    )
    assert isinstance(after, SampleRequest)
    return after


def test_progress_alone_rebuilds_a_response(make_engine: MakeEngine) -> None:
    engine, rebuilt = environed(make_engine, Counter(late=2)), {}  # type: ignore[var-annotated]
    engine.submit(requests(6, response=60))
    while engine.in_flight:
        finished = engine.step().finished
        for part in engine.progress():
            before = rebuilt.get(part.key.sample, ([], []))
            assert part.offset <= len(before[0])
            rebuilt[part.key.sample] = tuple(
                before[n][: part.offset] + new.tolist() for n, new in enumerate((part.tokens, part.log_probabilities))
            )
        for response in finished:
            tokens, numbers = rebuilt.get(response.key.sample, ([], []))
            assert response.tokens.tolist()[: len(tokens)] == tokens
            assert response.log_probabilities.tolist()[: len(numbers)] == numbers
            assert len(tokens) >= len(response.tokens) - len(
                written(response.tokens, response.log_probabilities).turns[-1]
            )


def test_an_environment_that_answers_otherwise_the_second_time_fails_its_sample(make_engine: MakeEngine) -> None:
    engine, (sample,) = environed(make_engine), requests(1, response=60)
    engine.submit([sample])
    while not any(NOT_SAMPLED in part.log_probabilities for part in engine.progress()):
        assert not engine.step().finished, "another sample is needed: this one has one turn"
    (withdrawn,) = engine.withdraw()
    tokens = withdrawn.tokens.copy()
    tokens[np.flatnonzero(withdrawn.log_probabilities == NOT_SAMPLED)[0]] += 1
    other = resumed(sample, ResponsePart(withdrawn.key, 0, tokens, withdrawn.log_probabilities, withdrawn.versions))
    engine.submit([other])
    with pytest.raises(
        EngineError, match=r"turn 1 was answered by .* must give the same answers to the same turns"
    ) as caught:
        finish(engine)
    assert (caught.value.reason, caught.value.key) == ("EnvironmentDiverged", other.key)
    assert [part.key for part in engine.withdraw([other.key])] == [other.key]
    assert engine.in_flight == 0


class Together(Counter):
    """Answers the first turns of three samples in one step: sample 0 fails, and the others end."""

    def collect(self) -> list[EnvironmentOutcome]:
        return super().collect() if len(self.asked) == 3 else []

    def _outcome(self, key: SampleKey, turns: list[str]) -> EnvironmentOutcome:
        if key.sample:
            return EnvironmentOutcome(key, (step("", done=True, reward=1.0),), None)
        return EnvironmentOutcome(key, (), pb.Failure(reason="EnvironmentRaised", message="boom", field="f"))


@pytest.mark.parametrize("by_key", [True, False])
def test_a_sample_that_ended_in_a_step_with_a_failure_can_be_withdrawn(
    make_engine: MakeEngine, *, by_key: bool
) -> None:
    """It was once reported as finished after it had been withdrawn."""
    engine, samples = environed(make_engine, Together()), requests(3, response=60)
    keys = [sample.key for sample in samples]
    with pytest.raises(EngineError, match="boom"):
        finish(engine, samples)
    withdrawn = engine.withdraw(keys[:2] if by_key else None)
    assert {part.key for part in withdrawn} == set(keys[:2] if by_key else keys)
    assert all(len(part.tokens) and not part.finish_reason and part.episode is None for part in withdrawn)
    assert [part.key for part in engine.step().finished] == (keys[2:] if by_key else [])
    assert engine.in_flight == 0


def test_a_failure_is_of_its_sample_which_keeps_its_tokens(make_engine: MakeEngine) -> None:
    calls = Counter(fail="boom")
    engine = environed(make_engine, calls)
    engine.submit(requests(3, response=60))
    for _ in range(3):
        with pytest.raises(EngineError, match="boom") as caught:
            finish(engine)
        (part,) = engine.withdraw([caught.value.key])  # type: ignore[list-item]
        assert part.tokens[-1] in STOPS or len(part.tokens) == 60
    assert engine.in_flight == 0
    engine.close()
    assert calls.closed
