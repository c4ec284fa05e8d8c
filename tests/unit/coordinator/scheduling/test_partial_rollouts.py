"""Samples carried into the next iteration: their data, and that no prompt is lost or repeated."""

import random
from collections import Counter

import pytest

from rlhf_api.algorithms.graph import SCORE_REWARD
from rlhf_api.algorithms.iteration_prompts import PromptSchedule
from rlhf_api.job.rollout import Rollout
from rlhf_common.samples import Episode, VersionSpan
from rlhf_coordinator.scheduling import oversampling
from rlhf_coordinator.scheduling.partial_rollouts import resume_partial
from rlhf_coordinator.state.carried_sample import CarriedSample, origin_in
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.state.sample import Origin, PackedResponse, SampleState
from rlhf_coordinator.storage.prompts import Prompt, PromptSet, random_key

GROUPS, MORE, SIBLINGS = 3, 2, 2
"""Prompts of a batch, additional prompts, and samples per prompt."""
SEED = 5
ONE_OLDER = Rollout(oversample=MORE, max_staleness=1, max_response_tokens=8)


def drawn(*spans: tuple[int, int]) -> PackedResponse:
    """Return a response of (version, tokens) spans whose tokens identify their version and position."""
    values = [16 * version + place for version, tokens in spans for place in range(tokens)]
    packed = b"".join(value.to_bytes(4, "little") for value in values)
    return PackedResponse(packed, packed, tuple(VersionSpan(*span) for span in spans))


def begun(iteration: int, carried: tuple[CarriedSample, ...] = ()) -> Ledger:
    size = (GROUPS + MORE) * SIBLINGS
    ledger = Ledger(iteration, size, (SCORE_REWARD,), 1, group_size=SIBLINGS, spare=MORE * SIBLINGS)
    ledger.resume_partial(carried)
    return ledger


def go_on(ledger: Ledger, index: int, tokens: int, *, ends: bool) -> None:
    """Continue to decode a sample with the iteration's weights."""
    earlier = ledger.samples[index].response
    attempt = ledger.assign(index, "w")
    more = drawn((ledger.iteration, tokens))
    if ends:
        ledger.finish(index, attempt, "w", earlier.with_tokens(len(earlier), more), "stop", f"text {index}")
    else:
        ledger.progress(index, attempt, "w", len(earlier), more)


def cut(ledger: Ledger) -> tuple[int, ...]:
    (decision,) = oversampling.decide(ledger, "Clock").cuts
    ledger.cut(decision.groups)
    return decision.groups


def test_what_was_cut_off_comes_first_with_all_that_is_known_of_it() -> None:
    ledger = begun(4)
    for index in (0, 1, 4, 5, 8, 9):
        go_on(ledger, index, 2, ends=True)
    go_on(ledger, 2, 3, ends=True)
    go_on(ledger, 7, 4, ends=False)
    ledger.samples[2].episode = Episode(2, 0.5)
    assert cut(ledger) == (1, 3)
    carried = resume_partial(ledger.carry_over(), 5, ONE_OLDER)
    assert [sample.origin for sample in carried] == [(4, 2), (4, 3), (4, 6), (4, 7)]
    assert not any(sample.restarted for sample in carried)
    after = begun(5, carried)
    assert [sample.origin for sample in after.samples] == [
        *((4, 2), (4, 3), (4, 6), (4, 7)),
        *((5, index) for index in range(4, 10)),
    ]
    finished = after.samples[0]
    assert (finished.state, finished.response, finished.finish_reason) == (SampleState.GENERATED, drawn((4, 3)), "stop")
    assert (finished.text, finished.episode, finished.decoded_by) == ("text 2", Episode(2, 0.5), ["w"])
    assert list(after.unscored()) == [0], "it is scored by the models of this iteration"
    assert after.samples[3].response == after.samples[3].carried == drawn((4, 4))
    assert after.queued(3)[0] == 3, "what has most tokens is gone on with first"
    assert after.tokens == 7
    assert after.counts() | {"queued": 0, "generated": 0} == dict.fromkeys(after.counts(), 0)


def test_a_response_is_what_was_carried_and_then_tokens_of_one_version() -> None:
    ledger = begun(5, (CarriedSample(Origin(4, 2), drawn((3, 1), (4, 2))),))
    assert ledger.continued_by(0, drawn((3, 1), (4, 2), (5, 1)))
    assert ledger.continued_by(0, drawn((3, 1), (4, 2)))
    assert ledger.continued_by(0, drawn((3, 1), (4, 1)))
    assert ledger.continued_by(0, PackedResponse())
    assert ledger.continued_by(1, drawn((5, 2), (5, 1)))
    assert not ledger.continued_by(0, drawn((5, 4))), "it was decoded from nothing"
    assert not ledger.continued_by(0, drawn((3, 1), (4, 3), (5, 1)))
    assert not ledger.continued_by(0, drawn((3, 1), (4, 2), (6, 1)))
    assert not ledger.continued_by(1, drawn((4, 2)))
    other = PackedResponse(b"\7\0\0\0" * 3, bytes(12), (VersionSpan(3, 1), VersionSpan(4, 2)))
    assert not ledger.continued_by(0, other), "who goes on with tokens does not change them"
    short = PackedResponse(bytes(8), bytes(8), (VersionSpan(5, 1),))
    assert not ledger.continued_by(1, short), "spans do not sum to the tokens"


def test_a_sample_with_a_token_that_is_too_old_is_begun_anew_as_itself() -> None:
    old = CarriedSample(Origin(3, 6), drawn((3, 2), (4, 2)), "stop", "text")
    new = CarriedSample(Origin(4, 7), drawn((4, 2)), "stop", "text")
    long = CarriedSample(Origin(4, 8), drawn((4, 9)))
    candidates = (old, new, long, CarriedSample(Origin(2, 9)))
    anew, resumed, cut_short, never_begun = resume_partial(candidates, 5, ONE_OLDER)
    assert anew == CarriedSample(Origin(3, 6), restarted=True)
    assert resumed == new
    assert cut_short == CarriedSample(Origin(4, 8), restarted=True), "no response may be so long any more"
    assert never_begun == CarriedSample(Origin(2, 9))
    assert resume_partial(candidates, 5, ONE_OLDER.model_copy(update={"max_staleness": 2}))[0] == old
    assert resume_partial((anew,), 5, ONE_OLDER) == (anew,), "deciding again changes nothing"


def test_a_sample_that_failed_is_not_tried_again_and_its_prompt_is_trained_on_without_it() -> None:
    """Workers would fail on it in every iteration; its prompt is not skipped either."""
    ledger = begun(0)
    ledger.give_up(2)
    for index in (0, 1, 3, 4, 5, 8, 9):
        go_on(ledger, index, 1, ends=True)
    assert cut(ledger) == (1, 3)
    after = begun(1, resume_partial(ledger.carry_over(), 1, ONE_OLDER))
    assert (after.samples[0].state, after.samples[0].origin) == (SampleState.FAILED, (0, 2))
    assert after.finished_groups() == [0]
    assert list(after.unscored()) == [1], "what is left of the group"
    for index in (2, 3, 6, 7):
        go_on(after, index, 1, ends=True)
    assert cut(after) == (2, 4)
    assert [(sample.index, masked) for sample, masked in after.batch()] == [
        *((0, True), (1, False), (2, False), (3, False)),
        *((6, False), (7, False)),
    ]


def test_without_staleness_nothing_is_carried() -> None:
    ledger = begun(0)
    for index in range(10):
        go_on(ledger, index, 1, ends=True)
    cut(ledger)
    assert ledger.carry_over()
    assert resume_partial(ledger.carry_over(), 1, Rollout(oversample=MORE)) == ()


@pytest.mark.parametrize("seed", range(20))
def test_every_prompt_is_trained_on_once_or_is_on_its_way(seed: int) -> None:
    """Runs many iterations in which the order of finishing is random, and samples are carried for different times."""
    rng = random.Random(seed)
    rollout = Rollout(oversample=MORE, max_staleness=rng.randint(1, 3), max_response_tokens=4096)
    lines = [Prompt(line, b"", "", "") for line in range(1, 1001)]
    begun_at_once = GROUPS + MORE
    prompts = PromptSet(
        lines,
        seed=SEED,
        shuffle=True,
        schedule=PromptSchedule(GROUPS, begun_at_once - GROUPS, "Carried"),
        samples_per_prompt=SIBLINGS,
    )
    trained: Counter[int] = Counter()
    keys: dict[int, set[int]] = {}
    ledger = begun(0)
    for iteration in range(12):
        order = list(range(GROUPS + MORE))
        rng.shuffle(order)
        for group in order[:GROUPS]:
            for sample in ledger.members_of(group):
                if sample.unfinished:
                    go_on(ledger, sample.index, rng.randint(1, 5), ends=True)
        for group in order[GROUPS:]:
            for sample in ledger.members_of(group):
                if sample.unfinished and rng.random() < 0.7:
                    go_on(ledger, sample.index, rng.randint(1, 5), ends=rng.random() < 0.3)
        cut(ledger)
        for sample in ledger.uncut_samples:
            line = prompts.prompt(*sample.origin).line
            trained[line] += 1
            keys.setdefault(line, set()).add(random_key(SEED, *sample.origin))
            ages = [iteration - span.version for span in sample.response.versions]
            assert max(ages) <= rollout.max_staleness
            assert ages == sorted(ages, reverse=True)
        carried = resume_partial(ledger.carry_over(), iteration + 1, rollout)
        on_the_way = {prompts.prompt(*sample.origin).line for sample in carried}
        assert set(trained.values()) == {SIBLINGS}, "every sample of a prompt, once"
        assert not on_the_way & set(trained)
        assert len(trained) + len(on_the_way) == (iteration + 1) * GROUPS + MORE, "none is passed over"
        assert [origin_in(carried, iteration + 1, index) for index in range(len(carried))] == [
            sample.origin for sample in carried
        ]
        ledger = begun(iteration + 1, carried)
    assert all(len(own) == SIBLINGS for own in keys.values()), "no two samples draw by one key"
