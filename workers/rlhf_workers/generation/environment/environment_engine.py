"""An engine for samples of several turns: it appends the environment's answers and continues decoding after them.

Rule: the response says who wrote a token (`turns.written`), so a returned sample continues from its tokens on another
worker. Must never lose a sample that waits for an answer, nor finish one whose last turn the environment has not seen.
"""

import os
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import torch

from rlhf_api.job import RLHFJobSpec
from rlhf_api.job.rollout import Prompts
from rlhf_common.model_files.text_tokens import response_text
from rlhf_common.names import Group
from rlhf_common.samples import FIRST_EVALUATION_SAMPLE, ResponsePart, SampleKey, SampleRequest, TokenArray
from rlhf_workers.generation.engine import (
    Engine,
    EngineCosts,
    EngineError,
    KeepsTurns,
    MeasuresCosts,
    Sleeps,
    StepReport,
)
from rlhf_workers.generation.environment.chat_answers import ChatTemplateError, answer_of
from rlhf_workers.generation.environment.environment_calls import (
    DIVERGED,
    FIELD,
    INVALID,
    EnvironmentCalls,
    EnvironmentOutcome,
)
from rlhf_workers.generation.environment.turns import AnsweredTurn, following, written
from rlhf_workers.generation.requests import known_response, sample_name
from rlhf_workers.generation.speculation.speculator import Speculates, Speculator
from rlhf_workers.user_code.code_settings import resolve_settings

NO_ARGUMENTS: Final[Mapping[str, Any]] = MappingProxyType({})


@runtime_checkable
class DecodesTurns(Engine, Sleeps, MeasuresCosts, Speculates, KeepsTurns, Protocol):
    """An engine that continues after tokens that it did not draw."""


@runtime_checkable
class HasEnvironment(Protocol):
    """An engine with child processes."""

    def close(self) -> None:
        """End the processes; samples must have been withdrawn."""


class EnvironmentEngine:
    """Implements `Engine`; sleep, cost measurement and drafts are the inner engine's."""

    def __init__(
        self,
        engine: DecodesTurns,
        calls: EnvironmentCalls,
        tokenizer: Any,
        max_turns: int,
        template_arguments: Mapping[str, Any] | None = NO_ARGUMENTS,
        evaluation_arguments: Mapping[str, Any] | None = NO_ARGUMENTS,
        ends: frozenset[int] = frozenset(),
    ) -> None:
        """`calls` are started, and end with `close`. `ends`: ids that end a turn and are not text.

        `template_arguments` and `evaluation_arguments`: arguments of the chat template in training and evaluations;
        None if it is not read here.
        """
        self._ends = ends
        self._template_arguments, self._evaluation_arguments = template_arguments, evaluation_arguments
        self._engine, self._calls, self._tokenizer, self._max_turns = engine, calls, tokenizer, max_turns
        self._requests: dict[SampleKey, SampleRequest] = {}  # requests of all its samples
        self._waiting: dict[SampleKey, ResponsePart] = {}  # responses so far, of samples that wait for an answer
        self._finished: list[ResponsePart] = []
        self._untold: dict[SampleKey, ResponsePart] = {}  # not in any `progress` yet, from their first token
        self._failures: list[EngineError] = []

    # ------------------------------------------------------------ Engine

    @property
    def version(self) -> int:
        """See Engine."""
        return self._engine.version

    @version.setter
    def version(self, version: int) -> None:
        self._engine.version = version

    @property
    def in_flight(self) -> int:
        """See Engine."""
        return len(self._requests)

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """See Engine."""
        for request in requests:
            if request.key in self._requests:
                raise EngineError("DuplicateSample", f"{sample_name(request.key)} is already in this engine")
        self._engine.submit(requests)
        self._requests |= {request.key: request for request in requests}

    def step(self) -> StepReport:
        """See Engine; continue or finish the samples with answers, and send ended turns to the environment."""
        for outcome in self._calls.collect():
            try:
                self._answered(outcome)
            except EngineError as error:
                self._failures.append(error)
        self._failures = [error for error in self._failures if error.key in self._waiting]
        if self._failures:
            raise self._failures.pop(0)
        report = self._engine.step() if self._engine.in_flight else StepReport()
        for response in report.finished:
            self._turn_ended(response)
        report.finished, self._finished = self._finished, []
        for response in report.finished:
            self._forget(response.key)
        return report

    def progress(self) -> list[ResponsePart]:
        """See Engine."""
        untold, self._untold = list(self._untold.values()), {}
        return untold + self._engine.progress()

    def withdraw(self, keys: Sequence[SampleKey] | None = None) -> list[ResponsePart]:
        """See Engine; a sample that waits for an answer is returned with its ended turn, and so is one that finished
        in a step that raised another sample's failure."""
        withdrawn = self._engine.withdraw(keys)
        wanted = frozenset(self._requests if keys is None else keys)
        withdrawn += [replace(part, finish_reason="") for key, part in self._waiting.items() if key in wanted]
        unreported = [response for response in self._finished if response.key in wanted]
        withdrawn += [replace(response, finish_reason="", episode=None) for response in unreported]
        self._finished = [response for response in self._finished if response.key not in wanted]
        for response in withdrawn:
            self._forget(response.key)
        return withdrawn

    def load_weights(self, tensors: Mapping[str, torch.Tensor], version: int) -> int:
        """See Engine."""
        return self._engine.load_weights(tensors, version)

    # ------------------------------------------------------------ abilities of the inner engine

    def sleep(self) -> None:
        """See Sleeps."""
        if self._requests:
            raise EngineError("EngineBusy", f"{len(self._requests)} samples must be withdrawn before sleep")
        self._engine.sleep()

    def wake(self) -> None:
        """See Sleeps."""
        self._engine.wake()

    def measure(self) -> Generator[None, None, EngineCosts]:
        """See MeasuresCosts."""
        return self._engine.measure()

    @property
    def speculator(self) -> Speculator | None:
        """See Speculates."""
        return self._engine.speculator

    def close(self) -> None:
        """See HasEnvironment."""
        self._calls.close()

    # ------------------------------------------------------------ turns

    def _turn_ended(self, response: ResponsePart) -> None:
        key = response.key
        turns = written(response.tokens, response.log_probabilities).turns
        self._waiting[key] = response
        self._untold[key] = replace(response, finish_reason="")
        self._calls.submit(key, self._requests[key].record, [self._text(turn) for turn in turns])

    def _answered(self, outcome: EnvironmentOutcome) -> None:
        """Continue a sample, or finish it; EngineError with its key if that fails."""
        key = outcome.key
        if outcome.failure is not None:
            raise EngineError(outcome.failure.reason, outcome.failure.message, outcome.failure.field, key)
        request, response, steps = self._requests[key], self._waiting[key], outcome.steps
        self._check_answers(response, steps)
        answer = self._tokens(key, steps[-1], response.tokens[-1:])
        after = following(request, response, answer, steps, self._max_turns, self.version)
        if isinstance(after, ResponsePart):
            self._finished.append(after)
        else:
            self._resume(after)
        del self._waiting[key]

    def _resume(self, request: SampleRequest) -> None:
        try:
            self._engine.submit([request])
        except EngineError as error:
            message = f"{FIELD}: generation cannot continue after its answer: {error}"
            raise EngineError(INVALID, message, FIELD, request.key) from error
        self._requests[request.key] = request
        self._untold[request.key] = known_response(request, "")

    def _check_answers(self, response: ResponsePart, steps: Sequence[AnsweredTurn]) -> None:
        """Raise EngineError if answers in the response differ from the environment's current ones."""
        parts = written(response.tokens, response.log_probabilities)
        for number, (turn, earlier, step) in enumerate(zip(parts.turns, parts.answers, steps, strict=False)):
            current = self._tokens(response.key, step, turn[-1:])
            if not np.array_equal(earlier, current):
                was, now = self._text(earlier), self._text(current)
                message = (
                    f"{FIELD}: {sample_name(response.key)}: turn {number + 1} was answered by {was[:80]!r} and is now "
                    f"answered by {now[:80]!r}; an environment must give the same answers to the same turns of a record"
                )
                raise EngineError(DIVERGED, message, FIELD, response.key)

    def _tokens(self, key: SampleKey, step: AnsweredTurn, last: TokenArray) -> TokenArray:
        """Return the tokens of an answer to a turn that ended with token `last`; its text may name special tokens."""
        text = self._from_messages(key, step, last) if step.messages else step.message
        ids = self._tokenizer.encode(text, add_special_tokens=False) if text else []
        if not ids and not step.done:
            raise EngineError(INVALID, f"{FIELD}: the answer {text[:80]!r} has no token", FIELD, key)
        return np.array(ids, np.int32)

    def _from_messages(self, key: SampleKey, step: AnsweredTurn, last: TokenArray) -> str:
        ended_by = str(self._tokenizer.decode(last.tolist(), skip_special_tokens=False))
        try:
            evaluated = key.sample >= FIRST_EVALUATION_SAMPLE
            arguments = self._evaluation_arguments if evaluated else self._template_arguments
            return answer_of(self._tokenizer, step.messages, ended_by, arguments)
        except ChatTemplateError as error:
            raise EngineError(INVALID, f"{FIELD}: messages: {error}", FIELD, key) from error

    def _text(self, tokens: TokenArray) -> str:
        return response_text(self._tokenizer, tokens.tolist(), self._ends)

    def _forget(self, key: SampleKey) -> None:
        self._requests.pop(key, None)
        self._waiting.pop(key, None)
        self._untold.pop(key, None)
        self._engine.forget_turn(key)
        self._calls.forget(key)


def with_environment(engine: Engine, spec: RLHFJobSpec, tokenizer: Any, ends: frozenset[int]) -> EnvironmentEngine:
    """Return the engine with the job's environment, whose first process runs; WorkError if it cannot be loaded.

    `ends` as for `EnvironmentEngine`.
    """
    assert spec.rollout.environment is not None
    assert isinstance(engine, DecodesTurns), "validation rejects an environment with any other engine"
    environment = spec.rollout.environment
    variables = spec.secret_variables(Group.GENERATION)
    settings = resolve_settings(environment.env, f"{FIELD}.env", variables, os.environ, invalid=INVALID)
    calls = EnvironmentCalls(environment, spec.generation.cpu_threads, settings)
    calls.start()
    if environment.cache_between_turns == "Enabled":
        engine.keep_turns()
    trained, evaluated = (_template_arguments(spec.prompts_of(sample)) for sample in (0, FIRST_EVALUATION_SAMPLE))
    return EnvironmentEngine(engine, calls, tokenizer, environment.max_turns, trained, evaluated, ends)


def _template_arguments(prompts: Prompts) -> Mapping[str, Any] | None:
    return None if prompts.chat_template_file else prompts.chat_template_arguments or NO_ARGUMENTS
