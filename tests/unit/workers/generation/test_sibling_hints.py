"""Draft hints in a worker: valid ones reach the drafters, and invalid ones do not."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import pack
from rlhf_common.samples import FIRST_AHEAD_SAMPLE, TokenArray
from rlhf_workers.generation.speculation.drafter import PromptGroup, SampleSource
from rlhf_workers.generation.speculation.sibling_hints import SiblingHints, SiblingLimits

LIMITS = SiblingLimits(groups=2, batch=8)


class Learner:
    """Records its hints."""

    def __init__(self) -> None:
        self.learned: dict[PromptGroup, list[tuple[SampleSource, int, list[int], float]]] = {}

    def learn(
        self, group: PromptGroup, source: SampleSource, offset: int, tokens: TokenArray, weight: float = 1.0
    ) -> None:
        self.learned.setdefault(group, []).append((source, offset, tokens.tolist(), weight))

    def forget(self, group: PromptGroup) -> None:
        self.learned.pop(group, None)


def delta(**fields: Any) -> pb.SiblingDelta:
    defaults: dict[str, Any] = {"group": 1, "iteration": 3, "sample": 5, "offset": 2, "weight": 1.0}
    return pb.SiblingDelta(**{**defaults, "tokens": pack(np.array([7, 8], np.int32)), **fields})


def message_of(*deltas: pb.SiblingDelta, forgotten: tuple[int, ...] = (), iteration: int = 3) -> pb.SiblingTokens:
    return pb.SiblingTokens(iteration=iteration, deltas=deltas, forgotten=forgotten)


def test_tokens_are_handed_on_until_their_group_is_over() -> None:
    learner = Learner()
    hints = SiblingHints(learner, LIMITS)
    hints.take(message_of(delta(), delta(group=0, iteration=1, sample=0, offset=0, weight=0.5)))
    assert learner.learned == {
        PromptGroup(3, 1): [(SampleSource(3, 5), 2, [7, 8], 1.0)],
        PromptGroup(3, 0): [(SampleSource(1, 0), 0, [7, 8], 0.5)],
    }
    hints.take(message_of(forgotten=(1,)))
    assert list(learner.learned) == [PromptGroup(3, 0)]
    hints.take(message_of(iteration=2))
    assert list(learner.learned) == [PromptGroup(3, 0)], "what comes late says nothing"
    hints.begin_iteration(4)
    assert learner.learned == {}
    assert (hints.learned, hints.refused) == (4, 0)


def test_nothing_stays_when_the_session_is_a_new_one() -> None:
    learner = Learner()
    hints = SiblingHints(learner, LIMITS)
    hints.take(message_of(delta()))
    hints.clear()
    assert learner.learned == {}
    hints.take(message_of(delta(offset=0)))
    assert len(learner.learned) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: delta(group=2),
        lambda: delta(group=-1),
        lambda: delta(iteration=4),
        lambda: delta(iteration=-1),
        lambda: delta(sample=8),
        lambda: delta(tokens=pack(np.array([], np.int32))),
        lambda: delta(tokens=pack(np.array([1.0], np.float32))),
        lambda: delta(tokens=pack(np.array([[1]], np.int32))),
        lambda: delta(tokens=pb.Array(dtype="int32", shape=[3], data=b"1")),
        lambda: delta(tokens=pb.Array(dtype="object", shape=[1], data=b"1")),
    ],
)
def test_what_makes_no_sense_is_left_out_and_counted(wrong: Callable[[], pb.SiblingDelta]) -> None:
    learner = Learner()
    hints = SiblingHints(learner, LIMITS)
    hints.take(message_of(wrong(), delta()))
    assert hints.refused == 1
    assert learner.learned == {PromptGroup(3, 1): [(SampleSource(3, 5), 2, [7, 8], 1.0)]}, "the rest goes on"


def test_drafts_ahead_have_numbers_of_their_own() -> None:
    learner = Learner()
    hints = SiblingHints(learner, LIMITS)
    hints.take(message_of(delta(sample=FIRST_AHEAD_SAMPLE + 5), delta(sample=FIRST_AHEAD_SAMPLE + LIMITS.batch)))
    assert learner.learned == {PromptGroup(3, 1): [(SampleSource(3, FIRST_AHEAD_SAMPLE + 5), 2, [7, 8], 1.0)]}
    assert hints.refused == 1
