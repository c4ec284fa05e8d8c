"""Drafts on a real vLLM engine with new weights in place, sleep, cached prefixes, invalid weights and step reports.

Invalid weights give no probabilities. The reference is the same engine without drafts.
"""

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.support.workers.engine_driving import finish, requests
from tests.support.workers.scripted_drafts import ScriptedSpeculator
from tests.support.workers.vllm_policy import RESPONSE, Policy

from rlhf_common.samples import ResponsePart, SampleKey, SampleRequest, VersionSpan
from rlhf_workers.generation.engine import EngineError, StepReport

pytestmark = pytest.mark.full


NEAR = 1e-5
"""Tolerance of log-probabilities between passes of different shapes."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policy]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    policy = Policy(tmp_path_factory.mktemp("policy"), "llama")
    yield policy
    policy.engine.close()
    torch.set_num_threads(before)


@pytest.fixture
def policy(served: Policy) -> Policy:
    """Return the policy at version 1, without samples and without a drafter."""
    served.engine.withdraw()
    served.engine.draft_by(None)
    served.update(1)
    return served


def knowing(responses: dict[int, ResponsePart], right: float = 0.7) -> ScriptedSpeculator:
    answers = {number: response.tokens.tolist() for number, response in responses.items()}
    return ScriptedSpeculator(np.random.default_rng(3), longest=5, right=right, answers=answers)


def same(got: dict[int, ResponsePart], wanted: dict[int, ResponsePart]) -> None:
    assert {number: part.tokens.tolist() for number, part in got.items()} == {
        number: part.tokens.tolist() for number, part in wanted.items()
    }
    far = [np.abs(part.log_probabilities - wanted[number].log_probabilities).max() for number, part in got.items()]
    assert max(far) < NEAR


def until_decoded(policy: Policy, tokens: int) -> int:
    """Step until the one sample has at least this number of tokens; return the number."""
    decoded = 0
    while decoded < tokens:
        assert not policy.engine.step().finished
        decoded += sum(len(part.tokens) for part in policy.engine.progress())
    return decoded


def test_weights_are_replaced_in_the_middle_of_a_drafted_response(policy: Policy) -> None:
    (sample,) = requests(1, response=RESPONSE)
    old = finish(policy.engine, [sample])
    policy.engine.draft_by(speculator := knowing(old, right=0.9))
    policy.engine.submit([sample])
    before = until_decoded(policy, 4)
    assert speculator.accepted, "or nothing was drafted before the update"
    policy.update(2)
    mixed = finish(policy.engine)
    assert mixed[0].versions == (VersionSpan(1, before), VersionSpan(2, RESPONSE - before))
    assert mixed[0].tokens[:before].tolist() == old[0].tokens[:before].tolist()
    assert speculator.drafted > speculator.accepted, "after it drafts by the old weights are wrong"

    policy.engine.draft_by(None)
    policy.update(1)
    policy.engine.submit([sample])
    assert until_decoded(policy, before) == before, "token by token"
    policy.update(2)
    same(mixed, finish(policy.engine))


def test_a_kept_prefix_holds_what_was_accepted_and_nothing_of_what_was_not(policy: Policy) -> None:
    (first,) = requests(1, seed=5, response=40)
    responses = finish(policy.engine, [first])
    longer = np.concatenate([first.prompt, responses[0].tokens])[:48]
    follower = SampleRequest(SampleKey(0, 1, 0), longer, 7, RESPONSE)
    policy.update(1)  # no earlier prefix is found
    policy.engine.draft_by(speculator := knowing(responses, right=0.5))
    same(finish(policy.engine, [first]), responses)
    assert speculator.drafted > speculator.accepted > 0
    policy.engine.draft_by(None)
    prefilled, warm = decode(policy, follower)
    assert prefilled < len(longer), "blocks that a drafted response filled are found"
    policy.update(1)
    prefilled, cold = decode(policy, follower)
    assert prefilled == len(longer)
    same(warm, cold)


def decode(policy: Policy, sample: SampleRequest) -> tuple[int, dict[int, ResponsePart]]:
    policy.engine.submit([sample])
    reports: list[StepReport] = []
    while policy.engine.in_flight:
        reports.append(policy.engine.step())
    done = {part.key.sample: part for report in reports for part in report.finished}
    return sum(report.prefilled for report in reports), done


def test_an_engine_that_slept_drafts_on_and_reports_what_it_did(policy: Policy) -> None:
    samples = requests(6, seed=9, response=RESPONSE)
    wanted = finish(policy.engine, samples)
    policy.engine.draft_by(speculator := knowing(wanted))
    policy.engine.sleep()
    policy.engine.wake()
    policy.engine.submit(samples)
    reports: list[StepReport] = []
    while policy.engine.in_flight:
        reports.append(policy.engine.step())
    same({part.key.sample: part for report in reports for part in report.finished}, wanted)
    assert sum(report.decoded for report in reports) == sum(len(part.tokens) for part in wanted.values())
    assert sum(report.drafted for report in reports) == speculator.drafted
    assert sum(report.accepted for report in reports) == speculator.accepted > 0
    drafted = [report for report in reports if report.drafted]
    assert all(report.pass_rows >= report.rows + report.drafted and report.verify_ns > 0 for report in drafted)
    assert all(report.decoded == report.rows + report.accepted for report in drafted if not report.finished)
    assert any(report.pass_rows == report.rows and not report.verify_ns for report in reports)
    assert all(report.draft_ns > 0 for report in drafted)


def test_weights_without_probabilities_end_a_drafted_step_as_any_other(policy: Policy) -> None:
    samples = requests(3, seed=2, response=RESPONSE)
    wanted = finish(policy.engine, samples)
    policy.engine.draft_by(knowing(wanted, right=1.0))
    policy.engine.submit(samples)
    before = {part.key: part.tokens.tolist() for part in decoded_some(policy)}
    policy.engine.load_weights({name: tensor * float("nan") for name, tensor in policy.weights().items()}, 2)
    with pytest.raises(EngineError, match="not finite") as raised:
        policy.engine.step()
    assert raised.value.reason == "NotFinite"
    left = policy.engine.withdraw()
    assert {part.key: part.tokens.tolist() for part in left} == before, "no token of such weights"


def decoded_some(policy: Policy) -> list[ResponsePart]:
    for _ in range(2):
        assert not policy.engine.step().finished
    return policy.engine.progress()


def test_drafts_are_refused_with_the_name_of_a_cache_that_cannot_be_rolled_back() -> None:
    """A cache of a recurrent state cannot; the test uses vLLM's description of caches, and no model."""

    from rlhf_workers.generation.vllm_engine.core_drafts import CoreDrafts  # imports vLLM

    class MambaSpec: ...

    class FullAttentionSpec: ...

    def refusal(*kinds: type) -> str:
        groups = [SimpleNamespace(kv_cache_spec=kind()) for kind in kinds]
        scheduler = SimpleNamespace(kv_cache_config=SimpleNamespace(kv_cache_groups=groups))
        config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=64), speculative_config=None)
        return CoreDrafts(SimpleNamespace(scheduler=scheduler, vllm_config=config)).refusal

    assert refusal(FullAttentionSpec) == ""
    assert "MambaSpec" in refusal(FullAttentionSpec, MambaSpec)
