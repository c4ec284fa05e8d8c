"""The generation role on the wire: commands answered once, progress four times per second, few spans, named errors."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.model_folders.models import CHARACTERS, build_tokenizer
from tests.support.workers.engine_driving import MakeEngine
from tests.support.workers.generation_roles import STEP_NS, SteppingClock, generate, generation_job, run
from tests.support.workers.outbox import RecordedOutbox
from transformers import AddedToken

from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import pack, unpack
from rlhf_common.samples import FIRST_AHEAD_SAMPLE, SampleKey
from rlhf_workers.failures import WorkError
from rlhf_workers.generation.engine import EngineError
from rlhf_workers.generation.generation_role import GenerationRole, build
from rlhf_workers.weights.fetching import FetchedWeights


@pytest.fixture
def role(make_engine: MakeEngine, load: Callable[[str], tuple[Any, Any]]) -> GenerationRole:
    return GenerationRole(make_engine(slots=4), load("llama")[1], clock_ns=SteppingClock())


def test_samples_come_back_whole_with_text_and_progress_adds_up(
    role: GenerationRole, load: Callable[[str], tuple[Any, Any]]
) -> None:
    outbox = RecordedOutbox()
    role.handle(generate(6), outbox)
    assert [done.command_id for done in outbox.reports("done")] == [1]
    assert role.active() == 6
    run(role, outbox)
    finished = {message.key.sample: message for message in outbox.reports("finished")}
    assert sorted(finished) == list(range(6))
    assert outbox.tokens == sum(len(unpack(message.tokens)) for message in finished.values())
    for message in finished.values():
        tokens = unpack(message.tokens)
        assert message.text == load("llama")[1].decode(tokens.tolist()).removesuffix("<eos>")
        assert message.key.attempt == 2
        assert sum(span.tokens for span in message.versions) == len(tokens)
    reported: dict[int, list[int]] = {}
    for message in outbox.reports("progress"):
        assert message.offset == len(reported.setdefault(message.key.sample, []))
        reported[message.key.sample] += unpack(message.tokens).tolist()
    assert reported
    assert all(unpack(finished[n].tokens).tolist()[: len(tokens)] == tokens for n, tokens in reported.items())


def test_special_tokens_of_a_response_are_text_but_its_end_is_not(make_engine: MakeEngine) -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken(letter, special=True) for letter in CHARACTERS])
    ends = frozenset({1, 5, 6, 7, 8, 9})
    role, outbox = GenerationRole(make_engine(stop_token_ids=tuple(ends)), tokenizer, ends=ends), RecordedOutbox()
    role.handle(generate(6), outbox)
    run(role, outbox)
    for message in outbox.reports("finished"):
        written = tokenizer.convert_ids_to_tokens(unpack(message.tokens).tolist())
        assert message.text == "".join(written[:-1] if message.finish_reason == "stop" else written)
    assert "stop" in {message.finish_reason for message in outbox.reports("finished")}


def test_progress_and_spans_are_spaced_in_time(role: GenerationRole) -> None:
    outbox = RecordedOutbox()
    role.handle(generate(4), outbox)
    run(role, outbox)
    spans = outbox.reports("span")
    steps = sum(int(attributes["steps"]) for *_, attributes in spans)
    assert steps == 40
    observed = outbox.reports("decode")
    assert [(item.start_ns, item.end_ns) for item in observed] == [(start, end) for _, start, end, *_ in spans]
    assert [item.decode.steps for item in observed] == [int(attributes["steps"]) for *_, attributes in spans]
    assert len(spans) == -(-steps * 2 * STEP_NS // 500_000_000)
    assert all(name == "decode" and end - start >= 480_000_000 for name, start, end, *_ in spans[:-1])
    assert sum(int(attributes["tokens"]) for *_, attributes in spans) == outbox.tokens
    per_sample = sum(message.key.sample == 0 for message in outbox.reports("progress"))
    assert per_sample == steps * 2 * STEP_NS // 300_000_000 - 1  # every 5th step of 60 ms; the 40th finishes it


@pytest.mark.parametrize("deterministic", [False, True])
def test_observations_say_what_building_caches_from_tokens_took(
    deterministic: bool, make_engine: MakeEngine, load: Callable[[str], tuple[Any, Any]]
) -> None:
    role = GenerationRole(make_engine(slots=4, deterministic=deterministic), load("llama")[1], clock_ns=SteppingClock())
    outbox = RecordedOutbox()
    role.handle(generate(2), outbox)
    for _ in range(7):
        role.step(outbox)
    returned = role.give_back()
    again = generate(2, identifier=2)
    prompts = sum(sample.prompt.shape[0] for sample in again.generate.samples)
    for sample, part in zip(again.generate.samples, sorted(returned, key=lambda item: item.key.sample), strict=True):
        sample.tokens.CopyFrom(part.tokens)
        sample.log_probabilities.CopyFrom(part.log_probabilities)
        sample.versions.extend(part.versions)
    role.handle(again, outbox)
    run(role, outbox)
    rebuilt = [observation.rebuild for observation in outbox.reports("rebuild")]
    assert all(item.rows_per_pass == 2 and item.seconds > 0 for item in rebuilt)
    passes = sum(item.passes for item in rebuilt)
    assert passes == (7 if deterministic else 1), "a step for every known token, or one prefill"
    if not deterministic:
        assert rebuilt[0].tokens_per_row == (prompts + 2 * 6) / 2
    drawn = [int(attributes.get("rebuild_passes", 0)) for *_, attributes in outbox.reports("span")]
    assert sum(drawn) == passes, "coordinators of the version before read them there"


def test_withdrawn_and_given_back_samples_carry_all_their_tokens_and_are_not_reported_again(
    role: GenerationRole,
) -> None:
    outbox = RecordedOutbox()
    role.handle(generate(6), outbox)
    for _ in range(7):
        role.step(outbox)
    keys = [pb.SampleKey(iteration=0, sample=n, attempt=2) for n in (0, 5, 77)]
    role.handle(pb.Command(id=2, withdraw=pb.Withdraw(keys=keys)), outbox)
    withdrawn = {message.key.sample: message for message in outbox.reports("done")[-1].withdraw.samples}
    assert {n: len(unpack(message.tokens)) for n, message in withdrawn.items()} == {0: 7, 5: 0}
    returned = role.give_back()
    assert sorted(message.key.sample for message in returned) == [1, 2, 3, 4]
    assert all(message.offset == 0 for message in returned)
    assert role.active() == 0
    assert not role.step(outbox)
    assert not outbox.reports("finished")


def test_a_resumed_sample_goes_on_after_its_tokens(role: GenerationRole) -> None:
    outbox = RecordedOutbox()
    whole = RecordedOutbox()
    role.handle(generate(1), whole)
    run(role, whole)
    tokens = unpack(whole.reports("finished")[0].tokens)
    again = generate(1, identifier=3)
    sample = again.generate.samples[0]
    sample.tokens.CopyFrom(pack(tokens[:9]))
    sample.log_probabilities.CopyFrom(pack(np.full(9, -1, np.float32)))
    sample.versions.add(version=0, tokens=9)
    role.handle(again, outbox)
    run(role, outbox)
    assert unpack(outbox.reports("finished")[0].tokens).tolist() == tokens.tolist()
    assert outbox.tokens == len(tokens) - 9


def test_a_wrong_sample_fails_the_command_with_its_field(role: GenerationRole) -> None:
    outbox = RecordedOutbox()
    with pytest.raises(WorkError, match="asked for 1000 response tokens") as raised:
        role.handle(generate(3, response=1000), outbox)
    assert raised.value.failure.field == "spec.rollout.maxResponseTokens"
    assert role.active() == 0
    assert not outbox.said


def test_weights_are_fetched_and_loaded_whole(
    make_engine: MakeEngine, load: Callable[[str], tuple[Any, Any]], tmp_path: Path
) -> None:
    state = {name: tensor.clone() for name, tensor in load("llama")[0].state_dict().items()}
    asked: list[tuple[str, int, list[str], Path | None]] = []

    @contextmanager
    def opened(
        model: str, version: int, sources: Sequence[pb.WeightLocation], certificates: Path | None
    ) -> Iterator[FetchedWeights]:
        asked.append((model, version, [source.address for source in sources], certificates))
        yield FetchedWeights(state, {"stream": 7})

    role = GenerationRole(make_engine(), load("llama")[1], tmp_path, weight_fetcher=opened)
    outbox = RecordedOutbox()
    command = pb.LoadWeights(model="actor", version=4, sources=[pb.WeightLocation(address="10.0.0.7:7710")])
    role.handle(pb.Command(id=9, load_weights=command), outbox)
    assert asked == [("actor", 4, ["10.0.0.7:7710"], tmp_path)]
    assert role.versions() == {"actor": 4}
    assert outbox.moves == [("weights_stream", 7)]
    done = outbox.reports("done")[0]
    assert (done.command_id, done.load.version) == (9, 4)
    assert done.load.bytes == sum(tensor.nbytes for tensor in state.values())
    with pytest.raises(WorkError, match="holds the actor, not 'critic'"):
        role.handle(pb.Command(id=10, load_weights=pb.LoadWeights(model="critic", version=4)), outbox)


def test_build_makes_a_role_that_decodes(policy: Callable[[str], Path]) -> None:
    command = pb.Command(id=1, become_generation=pb.BecomeGeneration(weights=pb.LoadWeights(model="actor")))
    role = build(generation_job(policy("llama")), command, torch.device("cpu"), None)
    outbox = RecordedOutbox()
    role.handle(generate(2), outbox)
    run(role, outbox)
    assert len(outbox.reports("finished")) == 2
    role.close()


@pytest.mark.parametrize(
    ("generation", "words", "field"),
    [
        ({"engineArgs": {"dtype": "int8"}}, "'int8' must be one of float32", "spec.generation.engineArgs.dtype"),
        ({"engineArgs": {"attention": "sdpa"}}, "in a deterministic job", "spec.generation.engineArgs.attention"),
        (
            {"engineArgs": {"staticShapes": "Enabled"}},
            "'Enabled' must be one of Disabled in a deterministic job",
            "spec.generation.engineArgs.staticShapes",
        ),
        (
            {"engine": "torch", "engineArgs": {"swap": 1}},
            "it takes dtype, attention",
            "spec.generation.engineArgs.swap",
        ),
    ],
)
def test_build_refuses_what_the_engine_does_not_have(
    generation: dict[str, Any], words: str, field: str, policy: Callable[[str], Path]
) -> None:
    with pytest.raises(WorkError, match=words) as raised:
        build(generation_job(policy("llama"), **generation), pb.Command(), torch.device("cpu"), None)
    assert raised.value.failure.field == field


def test_measuring_answers_with_the_costs_of_this_engine(role: GenerationRole) -> None:
    outbox = RecordedOutbox()
    role.handle(pb.Command(id=4, measure=pb.Measure(measurement_id=7, role="generation")), outbox)
    assert not outbox.said
    run(role, outbox)
    (done,) = outbox.reports("done")
    assert (done.command_id, done.measure.measurement_id) == (4, 7)
    costs = done.measure.generation
    assert {cost.batch for cost in costs.decode} >= {1, 4}
    assert costs.prefill
    assert costs.kv_bytes_per_token == 256


def test_a_parked_role_decodes_as_before_and_one_with_samples_is_not_parked(role: GenerationRole) -> None:
    whole, outbox = RecordedOutbox(), RecordedOutbox()
    role.handle(generate(2), whole)
    run(role, whole)
    offload = pb.Command(id=8, offload=pb.Offload(role="generation"))
    role.handle(offload, outbox)
    role.handle(generate(2, identifier=9), outbox)
    role.step(outbox)
    role.handle(offload, outbox)
    assert role.active() == 2
    run(role, outbox)
    assert [done.command_id for done in outbox.reports("done")] == [8, 9, 8]
    texts = [{message.key.sample: message.text for message in box.reports("finished")} for box in (whole, outbox)]
    assert texts[0] == texts[1]


class Refusing:
    """An engine that cannot continue while it has one sample."""

    def __init__(self, engine: Any, after: int) -> None:
        self._engine, self._after = engine, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> Any:
        self._after -= 1
        key = SampleKey(0, 2, 2)
        if self._after < 0 and any(request is not None and request.key == key for request in self.requests()):
            raise EngineError("KernelAssert", "sample 2 of iteration 0: index out of bounds", key=key)
        return self._engine.step()

    def requests(self) -> Sequence[Any]:
        state = self._engine._state
        return [*state.table.requests, *state.queue]


def test_a_sample_that_the_engine_cannot_decode_is_let_go_of_with_its_tokens_and_all_others_finish(
    make_engine: MakeEngine, load: Callable[[str], tuple[Any, Any]], role: GenerationRole
) -> None:
    engine = Refusing(make_engine(slots=4), after=7)
    refusing, outbox, usual = GenerationRole(engine, load("llama")[1]), RecordedOutbox(), RecordedOutbox()
    for driven, said in ((refusing, outbox), (role, usual)):
        driven.handle(generate(4), said)
        run(driven, said)
    (failed,) = outbox.reports("failed")
    assert (failed.key.sample, failed.failure.reason) == (2, "KernelAssert")
    whole = {message.key.sample: message for message in usual.reports("finished")}
    decoded = unpack(failed.progress.tokens).tolist()
    assert decoded == unpack(whole[2].tokens).tolist()[:7]
    del whole[2]
    assert {n: unpack(message.tokens).tolist() for n, message in whole.items()} == {
        message.key.sample: unpack(message.tokens).tolist() for message in outbox.reports("finished")
    }


def test_samples_decoded_ahead_are_reported_but_count_nowhere(role: GenerationRole) -> None:
    outbox = RecordedOutbox()
    command = generate(3, iteration=7)
    for sample in command.generate.samples:
        sample.key.sample += FIRST_AHEAD_SAMPLE
    role.handle(generate(1, iteration=6), outbox)
    run(role, outbox)
    counted, steps = outbox.tokens, role.engine_totals.steps
    observed = len(outbox.reports("decode"))
    command.id = 2
    role.handle(command, outbox)
    for _ in range(9):
        role.step(outbox)
    assert outbox.reports("progress"), "their tokens reach the coordinator"
    withdrawn = pb.Command(id=3, withdraw=pb.Withdraw(keys=[command.generate.samples[0].key]))
    role.handle(withdrawn, outbox)
    assert len(unpack(outbox.reports("done")[-1].withdraw.samples[0].tokens)) == 9, "one step more is not awaited"
    run(role, outbox)
    assert {message.key.sample for message in outbox.reports("finished")} == {
        0,
        FIRST_AHEAD_SAMPLE + 1,
        FIRST_AHEAD_SAMPLE + 2,
    }
    assert (outbox.tokens, role.engine_totals.steps) == (counted, steps)
    assert len(outbox.reports("decode")) == observed
    role.handle(generate(1, identifier=4, iteration=6), outbox)
    run(role, outbox)
    assert {item.iteration for item in outbox.reports("decode")} == {6}
    assert outbox.tokens > counted
