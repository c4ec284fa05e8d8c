"""The inference role without processes: every task of every sample is answered once, and failures stay separate."""

import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import pack, unpack
from rlhf_common.samples import FloatArray, SampleKey, ScoringSample
from rlhf_workers.failures import WorkError
from rlhf_workers.inference.batches import next_batch
from rlhf_workers.inference.group_comparisons import Comparing
from rlhf_workers.inference.inference_role import InferenceRole
from rlhf_workers.inference.rewards.reward_calls import RewardCalls
from rlhf_workers.inference.rewards.reward_source import Judgment, RewardError
from rlhf_workers.outbox import SessionOutbox
from rlhf_workers.weights.offload import OffloadableWeights


class Lengths:
    """A ModelScorer that scores a response by its length, and fails on token 13."""

    model = None
    frozen = True

    def __init__(self) -> None:
        self.batches: list[int] = []

    def score(self, samples: Sequence[ScoringSample]) -> list[FloatArray]:
        self.batches.append(len(samples))
        if any(13 in sample.response for sample in samples):
            raise WorkError("ModelNotFinite", "unlucky")
        return [np.full(len(sample.response), sample.length, np.float32) for sample in samples]


class Texts:
    """A RewardSource that reads the reward from the response."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def score(self, sample: ScoringSample) -> Judgment:
        if sample.response_text == "bad":
            raise RewardError("RewardRaised", "it is bad", "spec.models.reward.function")
        return Judgment(float(sample.response_text) if sample.response_text else None, {"long": 1.0})


def score_sample(
    number: int, response: Sequence[int], text: str = "", tasks: Sequence[str] = ("reference",)
) -> pb.ScoreSample:
    return pb.ScoreSample(
        key=pb.SampleKey(iteration=1, sample=number, attempt=4),
        tasks=tasks,
        prompt=pack(np.array([5, 6], np.int32)),
        response=pack(np.array(response, np.int32)),
        response_text=text,
    )


def sent(outbox: SessionOutbox) -> list[pb.WorkerMessage]:
    messages = outbox.unsent()
    outbox.sent(messages)
    return messages


def run(role: InferenceRole, *samples: pb.ScoreSample) -> list[pb.ScoredSample]:
    outbox = SessionOutbox("inference-0", lambda: None)
    outbox.begin(9)
    role.handle(pb.Command(id=9, score=pb.Score(samples=samples)), outbox)
    while role.active():
        role.step(outbox)
    messages = sent(outbox)
    assert [message.done.command_id for message in messages if message.HasField("done")] == [9]
    return [message.scored for message in messages if message.HasField("scored")]


def test_every_task_of_every_sample_is_answered_once() -> None:
    role = InferenceRole(batch_tokens=64, certificates=None)
    calls = RewardCalls(Texts())
    calls.start()
    role.add("reference", "reference", Lengths())
    role.add("reward", "reward", calls)
    tasks = ("reference", "reward")
    texts = ["0.5", "", "bad", "-2"]
    scored = run(role, *(score_sample(number, [7] * (number + 1), text, tasks) for number, text in enumerate(texts)))
    role.close()
    answers = {(message.key.sample, message.task): message for message in scored}
    assert len(answers) == len(scored) == 8
    assert all(message.key.attempt == 4 for message in scored)
    for number in range(4):
        assert unpack(answers[number, "reference"].result).tolist() == [number + 3.0] * (number + 1)
    assert unpack(answers[0, "reward"].result).tolist() == [0.5]
    assert answers[1, "reward"].abstained
    assert not answers[1, "reward"].HasField("result")
    assert answers[2, "reward"].failure.message == "it is bad"
    assert not answers[2, "reward"].HasField("result")
    assert unpack(answers[3, "reward"].result).tolist() == [-2.0]


class Ranks(Texts):
    """A source that ranks the responses to a prompt; "tie" abstains, and "alone" cannot be compared."""

    async def score_group(self, samples: Sequence[ScoringSample]) -> list[Judgment]:
        texts = [sample.response_text for sample in samples]
        if "alone" in texts:
            raise RewardError("RewardRaised", "nothing to compare it with", "spec.models.reward.function")
        return [Judgment(None if text == "tie" else float(sorted(texts).index(text))) for text in texts]


def test_the_responses_to_a_prompt_are_judged_together_and_fail_together() -> None:
    role = InferenceRole(batch_tokens=64, certificates=None)
    calls = RewardCalls(Ranks())
    calls.start()
    role.add("rank", "reward", calls, of_group=True)
    ranked = run(role, *(score_sample(n, [7], text, ["rank"]) for n, text in enumerate(("c", "a", "tie", "b"))))
    failed = run(role, *(score_sample(n, [7], text, ["rank"]) for n, text in enumerate(("alone", "a"))))
    role.close()
    assert {m.key.sample: None if m.abstained else unpack(m.result).tolist() for m in ranked} == {
        0: [2.0],
        1: [0.0],
        2: None,
        3: [1.0],
    }
    assert [message.failure.message for message in failed] == ["nothing to compare it with"] * 2


def test_a_source_that_judges_single_responses_gets_no_task_of_groups() -> None:
    role = InferenceRole(batch_tokens=64, certificates=None)
    with pytest.raises(WorkError, match="task rank judges the responses to a prompt together"):
        role.add("rank", "reward", RewardCalls(Texts()), of_group=True)


def test_one_bad_sample_fails_no_other() -> None:
    role = InferenceRole(batch_tokens=1024, certificates=None)
    scorer = Lengths()
    role.add("reference", "reference", scorer)
    empty = score_sample(3, [])
    scored = run(role, score_sample(0, [1]), score_sample(1, [13]), score_sample(2, [2]), empty)
    failures = {message.key.sample: message.failure.reason for message in scored if message.HasField("failure")}
    assert failures == {1: "ModelNotFinite", 3: "SampleInvalid"}
    assert scorer.batches == [3, 1, 1, 1]


def test_a_deterministic_job_scores_sample_by_sample() -> None:
    role = InferenceRole(batch_tokens=0, certificates=None)
    scorer = Lengths()
    role.add("reference", "reference", scorer)
    assert len(run(role, *(score_sample(number, [1]) for number in range(5)))) == 5
    assert scorer.batches == [1] * 5


def test_what_is_given_back_is_forgotten() -> None:
    role = InferenceRole(batch_tokens=64, certificates=None)
    role.add("reference", "reference", Lengths())
    outbox = SessionOutbox("inference-0", lambda: None)
    outbox.begin(1)
    role.handle(pb.Command(id=1, score=pb.Score(samples=[score_sample(0, [1])])), outbox)
    assert role.active() == 1
    assert role.give_back() == []
    assert role.active() == 0
    assert role.step(outbox) is False


def test_measuring_times_models_and_calls_no_reward() -> None:
    role = InferenceRole(batch_tokens=64, certificates=None, longest=40)
    calls, scorer = RewardCalls(Texts()), Lengths()
    calls.start()
    role.add("reference", "reference", scorer)
    role.add("reward", "reward", calls)
    outbox = SessionOutbox("inference-0", lambda: None)
    outbox.begin(5)
    started = time.monotonic()
    role.handle(pb.Command(id=5, measure=pb.Measure(measurement_id=3, role="inference")), outbox)
    while role.step(outbox):
        pass
    whole = time.monotonic() - started
    (message,) = sent(outbox)
    role.close()
    assert (message.done.command_id, message.done.measure.measurement_id) == (5, 3)
    (task,) = message.done.measure.scoring.tasks
    assert task.task == "reference"
    assert [(cost.batch, cost.tokens) for cost in task.costs] == [(1, 2), (1, 20), (2, 20), (1, 40), (1, 10)]
    assert all(cost.seconds > 0 for cost in task.costs)
    spent = [message.done.measure.scoring.onload_seconds, *(cost.seconds for cost in task.costs)]
    assert 0 <= spent[0] <= sum(spent) <= whole
    assert role.active() == 0


def test_parking_is_answered_and_scoring_wakes_the_models() -> None:
    role = InferenceRole(batch_tokens=64, certificates=None)
    model = torch.nn.Linear(2, 2)
    role.add("reference", "reference", Lengths(), OffloadableWeights(model, torch.device("cpu"), frozen=True))
    outbox = SessionOutbox("inference-0", lambda: None)
    outbox.begin(6)
    role.handle(pb.Command(id=6, offload=pb.Offload(role="inference")), outbox)
    assert [message.done.command_id for message in sent(outbox)] == [6]
    assert len(run(role, score_sample(0, [1]))) == 1


def test_a_task_the_worker_does_not_run_is_refused_as_a_whole() -> None:
    role = InferenceRole(batch_tokens=64, certificates=None)
    role.add("reference", "reference", Lengths())
    outbox = SessionOutbox("inference-0", lambda: None)
    with pytest.raises(WorkError, match="asked for task values on a worker that runs reference"):
        role.handle(pb.Command(id=1, score=pb.Score(samples=[score_sample(0, [1], tasks=["values"])])), outbox)
    assert role.active() == 0


def test_batches_hold_the_oldest_and_those_nearest_in_length() -> None:
    def sample(length: int) -> ScoringSample:
        return ScoringSample(SampleKey(0, 0, 0), np.ones(1, np.int32), np.ones(length - 1, np.int32), "", "", "")

    waiting = deque(map(sample, [20, 100, 30, 17, 5, 400]))
    batch = next_batch(waiting, batch_tokens=100)
    assert [sample.length for sample in batch] == [20, 17, 30]  # three rows padded to 32 tokens; a fourth would be 128
    assert [sample.length for sample in waiting] == [100, 5, 400]
    assert [sample.length for sample in next_batch(waiting, batch_tokens=10)] == [100]
    assert [sample.length for sample in next_batch(waiting, batch_tokens=0)] == [5]
    waiting = deque(map(sample, [500, 20, 20, 480, 20, 500]))
    # Without padding of 480 a row.
    assert [sample.length for sample in next_batch(waiting, batch_tokens=9000)] == [500, 500, 480]
    assert [sample.length for sample in next_batch(waiting, batch_tokens=9000)] == [20, 20, 20]


class Comparer:
    """A GroupScorer that rewards a response by its position, and yields once for each."""

    model = None
    frozen = True

    def compare(self, samples: Sequence[ScoringSample]) -> Comparing:
        for sample in samples:
            yield
            if 13 in sample.response:
                raise WorkError("RewardInvalid", "unlucky")
        if len(samples) == 1:
            return [None]
        return [np.array([place], np.float32) for place in range(len(samples))]


def test_groups_are_compared_a_step_at_a_time_and_answered_whole() -> None:
    outbox = SessionOutbox("inference-0", lambda: None)
    role = InferenceRole(batch_tokens=0, certificates=None)
    role.add("rank", "reward", Comparer(), of_group=True)
    role.add("reference", "reference", Lengths())
    groups = ([(0, [7]), (1, [8])], [(2, [7]), (3, [9, 13])], [(4, [9])])
    for number, group in enumerate(groups, 1):
        samples = [score_sample(index, response, tasks=["rank"]) for index, response in group]
        outbox.begin(number)
        role.handle(pb.Command(id=number, score=pb.Score(samples=samples)), outbox)
    assert role.active() == 5
    steps = 0
    while role.step(outbox):
        steps += 1
    assert role.active() == 0
    assert steps == 5 + 3, "one comparison a step, and a step in which the group ends"
    answers = {message.scored.key.sample: message.scored for message in sent(outbox) if message.HasField("scored")}
    assert sorted(answers) == [0, 1, 2, 3, 4]
    assert [unpack(answers[number].result).tolist() for number in (0, 1)] == [[0.0], [1.0]]
    assert [answers[number].failure.message for number in (2, 3)] == ["unlucky"] * 2
    assert answers[4].abstained
    assert not answers[4].HasField("result")


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("by_model", [True, False])
def test_a_group_with_a_malformed_sample_fails_together(*, by_model: bool, place: int) -> None:
    """The others were once compared without it, which gives other results, and no one asked for those."""
    role = InferenceRole(batch_tokens=0, certificates=None)
    calls = RewardCalls(Ranks())
    calls.start()
    role.add("rank", "reward", Comparer() if by_model else calls, of_group=True)
    role.add("reference", "reference", Lengths())
    group = [score_sample(number, [7], "text", ["rank"]) for number in range(3)]
    group[place].response.data = b"odd"
    scored = run(role, *group, score_sample(3, [7], tasks=["reference"]))
    whole = run(role, *(score_sample(number, [7], "text", ["rank"]) for number in range(4, 6)))
    role.close()
    failures = [message for message in scored if message.HasField("failure")]
    assert [message.key.sample for message in failures] == [place, *({0, 1, 2} - {place})]
    assert {(message.task, message.failure.reason) for message in failures} == {("rank", "SampleInvalid")}
    assert len({message.failure.message for message in failures}) == 1, "all name the malformed one"
    assert len(scored) == 4
    assert [message.HasField("result") for message in whole] == [True, True]


def test_groups_that_are_given_back_are_not_answered() -> None:
    outbox = SessionOutbox("inference-0", lambda: None)
    role = InferenceRole(batch_tokens=0, certificates=None)
    role.add("rank", "reward", Comparer(), of_group=True)
    outbox.begin(1)
    role.handle(
        pb.Command(id=1, score=pb.Score(samples=[score_sample(n, [7], tasks=["rank"]) for n in (0, 1)])), outbox
    )
    assert role.step(outbox)
    assert role.active() == 2
    role.give_back()
    assert role.active() == 0
    assert not role.step(outbox)
    assert not any(message.HasField("scored") for message in sent(outbox))
