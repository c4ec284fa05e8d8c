"""Drafts change no token: single steps give the same result for any drafts and any events of samples.

Bitwise equal in deterministic mode; in float32 of the fast mode log-probabilities agree except for rounding.
"""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.support.model_folders.models import ARCHITECTURES, VOCABULARY, build_tokenizer
from tests.support.workers.engine_driving import MakeEngine, disturb, finish, requests, resumed, same_bits, same_tokens
from tests.support.workers.random_drafts import RandomDrafts

from rlhf_common.samples import Drawing, ResponsePart, SampleRequest, VersionSpan
from rlhf_workers.generation.torch_engine.engine import TorchEngine
from rlhf_workers.generation.torch_engine.fused_forward import FAMILIES
from rlhf_workers.models.loading import replace_weights

SAMPLES = 40
RESPONSE = 36
TOLERANCE = 1e-5
"""Tolerance of log-probabilities in float32, where passes of several positions sum in another order."""


@pytest.fixture(scope="module")
def samples() -> list[SampleRequest]:
    """Some start far from the key length at which deterministic passes change, some reach it within a draft."""
    return [
        replace(sample, max_response_tokens=1 + (7 * sample.key.sample) % RESPONSE)
        for sample in requests(SAMPLES, seed=4, longest=48, response=RESPONSE)
    ]


def churned(engines: list[TorchEngine], samples: list[SampleRequest], seed: int) -> dict[int, ResponsePart]:
    """Run samples that join, leave, pause and move, by tokens or with caches, between two engines."""
    moves = random.Random(seed)
    by_number = {sample.key.sample: sample for sample in samples}
    waiting, done = list(samples), dict[int, ResponsePart]()
    while waiting or any(engine.in_flight for engine in engines):
        for _ in range(moves.randrange(5)):
            if waiting:
                moves.choice(engines).submit([waiting.pop()])
        for engine, other in (engines, engines[::-1]):
            for response in engine.step().finished:
                assert response.key.sample not in done
                done[response.key.sample] = response
            keys = sorted(engine._state.in_flight)
            if keys and moves.random() < 0.3:
                disturb(engine, other, moves, by_number, done)
    return done


@pytest.mark.full
@pytest.mark.parametrize("ways", [{"deterministic": True}, {"attention": "sdpa"}], ids=["deterministic", "fast"])
def test_a_hundred_seeds_of_drafts_and_disturbances_change_no_token(
    ways: dict[str, Any], make_engine: MakeEngine, samples: list[SampleRequest]
) -> None:
    deterministic = "deterministic" in ways
    whole = finish(make_engine(**ways, slots=SAMPLES), samples)
    pairs = {slots: [make_engine(**ways, slots=slots) for _ in range(2)] for slots in (3, 20)}
    accepted = rejected = 0
    for seed in range(100):
        dice = random.Random(seed)
        chosen = dice.sample(samples, dice.choice([1, 2, 3, 5, 5, 20]))
        engines = pairs[dice.choice(sorted(pairs))]
        drafts = [
            RandomDrafts(whole, VOCABULARY, right=dice.choice([0, 0.5, 0.9, 1]), longest=longest, seed=seed)
            for longest in (dice.randint(1, 8), dice.choice([0, 3, 16]))
        ]
        for engine, drafter in zip(engines, drafts, strict=True):
            engine.draft_by(drafter)
        done = churned(engines, chosen, seed)
        assert sorted(done) == sorted(sample.key.sample for sample in chosen)
        for number, response in done.items():
            wanted = whole[number]
            assert response.tokens.tolist() == wanted.tokens.tolist(), f"seed {seed}"
            assert response.finish_reason == wanted.finish_reason
            assert response.versions == wanted.versions
            assert np.abs(response.log_probabilities - wanted.log_probabilities).max() < TOLERANCE
            assert not deterministic or same_bits(response, wanted), f"seed {seed}: other bits"
        for drafter in drafts:
            assert not drafter.decoded, "every sample that began has ended"
            accepted += sum(outcome.accepted for outcome in drafter.outcomes)
            rejected += sum(outcome.drafted - outcome.accepted for outcome in drafter.outcomes)
    assert min(accepted, rejected) > 1000


def test_greedy_responses_beside_sampled_ones_are_drafted_and_moved_alike(
    make_engine: MakeEngine, samples: list[SampleRequest]
) -> None:
    alone = {"deterministic": True, "slots": 8}
    greedy = finish(make_engine(**alone, temperature=0), samples[1:8:2])
    wanted = finish(make_engine(**alone), samples[0:8:2]) | greedy
    engines = [make_engine(**alone, by_request=True) for _ in range(2)]
    for number, engine in enumerate(engines):
        engine.draft_by(RandomDrafts(wanted, VOCABULARY, right=0.7, longest=5, seed=number))
    mixed = [
        replace(sample, drawing=Drawing.GREEDY if number % 2 else Drawing.ROLLOUT)
        for number, sample in enumerate(samples[:8])
    ]
    for seed in range(5):
        done = churned(engines, mixed, seed)
        assert done.keys() == wanted.keys()
        assert all(same_bits(response, wanted[number]) for number, response in done.items()), f"seed {seed}"


def test_many_short_samples_are_drafted_for_in_a_deterministic_engine(make_engine: MakeEngine) -> None:
    """Caches have 16 positions, and passes 256 rows: a trial has no more rows of a sample than its cache holds."""
    ways: dict[str, Any] = {"deterministic": True, "slots": 128, "prompt_tokens": 4, "response_tokens": 8}
    short = requests(128, seed=6, longest=4, response=8)
    whole = finish(make_engine(**ways), short)
    drafts = RandomDrafts(whole, VOCABULARY, right=0.9, longest=6)
    done = finish(make_engine(**ways, speculator=drafts), short)
    assert all(same_bits(response, whole[number]) for number, response in done.items())
    assert sum(outcome.accepted for outcome in drafts.outcomes) > 50


STOPS: dict[str, Any] = {"stop": ("a", "7:", "\n="), "stop_token_ids": (9,)}
WAYS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"temperature": 0}),
    ("llama", {"static_shapes": True}),
    ("llama", {"fused_kernels": "Enabled"}),
    ("llama", {"temperature": 0.7, "top_p": 0.8, "top_k": 9, "attention": "sdpa"}),
    ("llama", {"attention": "sdpa"} | STOPS),
    *((name, {"deterministic": True} | STOPS) for name in ARCHITECTURES),
    *((name, {"attention": "sdpa"}) for name in ARCHITECTURES[1:]),
    *((name, {"fused_kernels": "Enabled", "static_shapes": True}) for name in FAMILIES),
]


@pytest.mark.full(quick=1)
@pytest.mark.parametrize(
    ("architecture", "ways"), WAYS, ids=lambda value: value if isinstance(value, str) else ", ".join(value)
)
def test_every_way_of_decoding_verifies_drafts(
    architecture: str, ways: dict[str, Any], make_engine: MakeEngine, samples: list[SampleRequest]
) -> None:
    """Models with windows and capped scores, captured and fused passes, stops of every kind inside drafts."""
    plain = {name: value for name, value in ways.items() if name not in ("static_shapes", "fused_kernels")}
    whole = finish(make_engine(architecture, **plain, slots=9), samples[:16])
    drafts = [RandomDrafts(whole, VOCABULARY, right=0.8, longest=longest, seed=1) for longest in (8, 4)]
    done = churned(
        [make_engine(architecture, **ways, slots=9, speculator=drafter) for drafter in drafts], samples[:16], 1
    )
    same_tokens(done, whole)
    assert sum(outcome.accepted for drafter in drafts for outcome in drafter.outcomes) > 50


def test_a_stop_string_inside_a_draft_ends_the_response_there(make_engine: MakeEngine) -> None:
    """The draft continues after the stop, like another sample's text, and matches the policy."""
    sample = requests(1, seed=2, response=40)[0]
    endless = finish(make_engine(), [sample])[0]
    text = build_tokenizer().decode(endless.tokens[10:13].tolist())
    plain = finish(make_engine(stop=(text,)), [sample])[0]
    drafts = RandomDrafts({0: endless}, VOCABULARY, right=1, longest=16)
    engine = make_engine(stop=(text,), speculator=drafts)
    engine.submit([sample])
    reports = []
    while engine.in_flight:
        reports.append(engine.step())
    ended = reports[-1].finished[0]
    assert (ended.tokens.tolist(), ended.finish_reason) == (plain.tokens.tolist(), "stop")
    assert sum(report.decoded for report in reports) == len(plain.tokens) > len(reports)
    assert sum(report.accepted for report in reports) <= len(plain.tokens)
    assert all(report.verify_ns > 0 for report in reports if report.drafted)


def test_a_draft_ends_where_the_key_length_of_single_steps_changes(make_engine: MakeEngine) -> None:
    prompt = np.resize(requests(1, longest=48)[0].prompt, 48)
    sample = replace(requests(1, response=40)[0], prompt=prompt)
    whole = finish(make_engine(deterministic=True), [sample])
    drafts = RandomDrafts(whole, VOCABULARY, right=1, longest=16)
    engine = make_engine(deterministic=True, speculator=drafts)
    engine.submit([sample])
    ends = set()
    while engine.in_flight:
        before = engine.moves.cached(sample.key) or 47
        engine.step()
        after = engine.moves.cached(sample.key)
        assert after is None or before >= 64 or after <= 64
        ends.add(after)
    assert 64 in ends, "a draft reached the boundary"
    engine.submit([sample])
    assert same_bits(finish(engine)[0], whole[0])


def test_tokens_drawn_after_an_update_bear_it_whatever_was_drafted(make_engine: MakeEngine, load: Any) -> None:
    model = load("llama")[0]
    first = {name: tensor.clone() for name, tensor in model.named_parameters()}
    second = {name: tensor * 1.1 for name, tensor in first.items()}
    samples = requests(9, seed=3, response=40)
    whole = finish(make_engine(deterministic=True), samples)
    sample = next(sample for sample in samples if len(whole[sample.key.sample].tokens) == 40)
    drafts = RandomDrafts(whole, VOCABULARY, right=0.9, longest=6)
    drafted, plain = make_engine(deterministic=True, speculator=drafts), make_engine(deterministic=True)
    try:
        drafted.submit([sample])
        for _ in range(3):
            drafted.step()
        drawn = [len(part.tokens) for part in drafted.progress()]
        plain.submit([sample])
        for _ in range(sum(drawn)):
            plain.step()
        drafted.load_weights(second, 1)
        plain.load_weights(second, 1)
        (with_drafts,), (without_drafts,) = (finish(engine).values() for engine in (drafted, plain))
    finally:
        replace_weights(model, first, subject="the first version")
    assert same_bits(with_drafts, without_drafts)
    assert (
        with_drafts.versions
        == without_drafts.versions
        == (VersionSpan(0, sum(drawn)), VersionSpan(1, len(with_drafts.tokens) - sum(drawn)))
    )


@pytest.mark.parametrize("ways", [{"deterministic": True}, {"attention": "sdpa"}], ids=["deterministic", "fast"])
def test_a_step_reports_the_keys_of_its_drafts_rows_too(ways: dict[str, Any], make_engine: MakeEngine) -> None:
    """Costs are learned by keys per row, so a sample's drafts must not make its cache look shorter."""
    [sample] = requests(1, seed=4, longest=48, response=RESPONSE)
    whole = finish(make_engine(**ways), [sample])
    engine = make_engine(**ways, speculator=RandomDrafts(whole, VOCABULARY, right=0.8, longest=4, seed=1))
    engine.submit([sample])
    reports = []
    while engine.in_flight:
        reports.append(engine.step())
    assert any(report.pass_rows > report.rows for report in reports)
    assert all(report.keys >= report.pass_rows * report.positions for report in reports)


def test_known_tokens_are_replayed_by_the_dozen(make_engine: MakeEngine) -> None:
    sample = requests(1, seed=5, response=90)[0]
    whole = finish(make_engine(deterministic=True), [sample])[0]
    partial = replace(whole, tokens=whole.tokens[:80], log_probabilities=whole.log_probabilities[:80])
    engine = make_engine(deterministic=True)
    engine.submit([replace(resumed(sample, partial), versions=(VersionSpan(0, 80),))])
    reports = []
    while engine.in_flight:
        reports.append(engine.step())
    assert same_bits(reports[-1].finished[0], whole)
    assert sum(report.replayed for report in reports) == 80
    assert sum(report.replayed > 0 for report in reports) <= 6
    assert sum(report.decoded for report in reports) == 10


def test_where_several_rows_change_bits_each_sample_has_one(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    sample = requests(1, seed=5, response=40)[0]
    whole = finish(make_engine(deterministic=True), [sample])
    drafts = RandomDrafts(whole, VOCABULARY, right=1, longest=8)
    engine = make_engine(deterministic=True, speculator=drafts)
    own = engine._forward.decode_rows

    def other_bits(*arguments: Any, **named: Any) -> Any:
        return own(*arguments, **named) + 1e-6

    engine._forward.decode_rows = other_bits  # type: ignore[method-assign]
    assert same_bits(finish(engine, [sample])[0], whole[0])
    assert not drafts.outcomes, "nothing was drafted where it could not be verified"
    assert "samples of up to 64 tokens are decoded token by token" in caplog.text
