"""A judge rates by its probabilities or its text, at an endpoint or as a model; an unrated sample has no number."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.model_folders import models
from tests.support.training.training_ranks import make_job
from tests.support.workers.answering_server import answering
from tests.support.workers.reward_samples import sample
from tokenizers import processors

from rlhf_api.algorithms.graph import SCORE_REWARD
from rlhf_api.job import RLHFJob
from rlhf_api.job.judge import Judge
from rlhf_workers.failures import WorkError
from rlhf_workers.inference.rewards.judge import JudgeAtEndpoint
from rlhf_workers.inference.rewards.judge_answers import (
    UnaskableError,
    UnreadableAnswerError,
    question,
    worth,
    written,
)
from rlhf_workers.inference.rewards.judge_model import JudgeModelComparer, JudgeModelScorer
from rlhf_workers.inference.rewards.registry import load_reward
from rlhf_workers.inference.rewards.reward_source import RewardError
from rlhf_workers.user_code.code_settings import CodeSettings

CPU = torch.device("cpu")
SECRET = "Bearer sk-tell-nobody"
BIAS = 0.8
"""Bias of the test's judge for the first response, in nats."""


def direct(text: str) -> dict[str, float]:
    """Token -> probability: a long response is rated 9, with blanks and without, and never the token "the"."""
    share = min(len(text.split("Response:")[1].split("How good")[0].strip()), 10) / 10
    return {"9": share / 2, " 9": share / 2, "1": 1 - share}


def pairwise(text: str) -> dict[str, float]:
    """The longer response is better, and the first one has a bias."""
    first = text.split("Response 1:")[1].split("Response 2:")[0].strip()
    second = text.split("Response 2:")[1].split("Which response")[0].strip()
    odds = math.exp(len(first) - len(second) + BIAS)
    return {"1": odds / (1 + odds), "2": 1 / (1 + odds)}


ASKED: list[dict[str, Any]] = []
"""All requests to the judge."""


def judge_server(request: dict[str, Any], headers: Message) -> tuple[int, Any]:
    """A server for both of OpenAI's formats, with authentication."""
    ASKED.append(request)
    if headers["Authorization"] != SECRET:
        return 401, {"error": f"who is {headers['Authorization']}?"}
    text = request["prompt"] if "prompt" in request else request["messages"][0]["content"]
    if "nonsense" in text:
        top = {"the": 0.0, "9": -20.0}
    else:
        shares = (pairwise if "Response 2:" in text else direct)(text)
        top = {token: math.log(max(share, 1e-30)) for token, share in shares.items()}
    if "prompt" in request:
        return 200, {"choices": [{"text": " 9", "logprobs": {"top_logprobs": [top]}}]}
    content = [{"top_logprobs": [{"token": token, "logprob": log} for token, log in top.items()]}]
    message = {"content": "It is 3 lines long. Rating: 7"}
    logprobs = {"content": content} if request.get("logprobs") else None
    return 200, {"choices": [{"message": message, "logprobs": logprobs}]}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with answering(judge_server) as address:
        yield f"{address}/v1"


def source_of(url: str, secret: str = SECRET, api: str = "Chat", **fields: Any) -> JudgeAtEndpoint:
    judge = Judge.model_validate({"endpoint": {"url": url, "model": "judge", "api": api}, **fields})
    settings = CodeSettings({"Authorization": secret}, frozenset({"Authorization"}))
    return JudgeAtEndpoint(judge, 60.0, settings, field="spec.models.reward")


@pytest.mark.parametrize("api", ["Chat", "Completions"])
async def test_the_expected_rating_is_scaled_to_minus_1_to_1(url: str, api: str) -> None:
    source = source_of(url, api=api)
    await source.start()
    try:
        for response, reward in (("", -1.0), ("x" * 5, 0.0), ("x" * 10, 1.0)):
            assert (await source.score(sample(response))).reward == pytest.approx(reward, abs=1e-9)
        asked = ASKED[-1]
        assert (asked["model"], asked["max_tokens"], asked["temperature"]) == ("judge", 1, 0)
    finally:
        await source.close()


@pytest.mark.parametrize(("api", "requested"), [("Chat", "top_logprobs"), ("Completions", "logprobs")])
async def test_a_server_with_fewer_logprobs_fails_with_the_setting(api: str, requested: str) -> None:
    def refusing(request: dict[str, Any], headers: Message) -> tuple[int, Any]:
        if requested in request:
            return 400, {"error": f"Requested sample logprobs of {request[requested]}, greater than max allowed: 5"}
        return 400, {"error": "the model is not loaded"}

    with answering(refusing) as address:
        source, reads = source_of(f"{address}/v1", api=api), source_of(f"{address}/v1", api=api, read="Answer")
        await source.start()
        await reads.start()
        try:
            with pytest.raises(
                RewardError, match=r"max allowed: 5.*; set .* to Answer, or let .* --max-logprobs 20"
            ) as raised:
                await source.score(sample("any"))
            assert raised.value.failure.field == "spec.models.reward.judge.read"
            with pytest.raises(RewardError, match="the model is not loaded") as other:
                await reads.score(sample("any"))
            assert other.value.failure.field == "spec.models.reward.judge.endpoint.url"
        finally:
            await source.close()
            await reads.close()


async def test_a_written_answer_is_read_to_its_last_number(url: str) -> None:
    source = source_of(url, read="Answer")
    await source.start()
    try:
        assert (await source.score(sample("any"))).reward == pytest.approx(2 * (7 - 1) / 8 - 1)
        assert "logprobs" not in ASKED[-1]
    finally:
        await source.close()


async def test_what_a_judge_gives_to_a_place_cancels_out(url: str) -> None:
    source = source_of(url, method="Pairwise")
    await source.start()
    try:
        same = await source.score_group([sample("abc"), sample("xyz")])
        assert [each.reward for each in same] == pytest.approx([0.5, 0.5])
        short, middle, long = [
            each.reward or 0.0 for each in await source.score_group([sample(text) for text in ("a", "bcd", "efghi")])
        ]
        assert short < middle < long
        assert short + middle + long == pytest.approx(1.5)
        assert middle == pytest.approx(0.5)
        assert [each.reward for each in await source.score_group([sample("alone")])] == [None]
    finally:
        await source.close()


async def test_a_judge_that_rates_nothing_is_a_failure_and_no_secret_is_quoted(url: str) -> None:
    source = source_of(url)
    await source.start()
    try:
        with pytest.raises(WorkError, match=r"have 2.1e-09 of the probability") as caught:
            await source.score(sample("nonsense"))
        assert caught.value.failure.retryable
        assert caught.value.failure.field == "spec.models.reward.judge.endpoint.url"
    finally:
        await source.close()
    stranger = source_of(url, secret="Bearer sk-other")
    await stranger.start()
    try:
        with pytest.raises(WorkError, match=r"status 401: .*who is \*\*\*"):
            await stranger.score(sample("any"))
    finally:
        await stranger.close()


@given(st.dictionaries(st.sampled_from([*"0123456789", "the"]), st.floats(0, 1), min_size=1))
def test_a_rating_is_the_expected_label_of_those_that_are_allowed(probabilities: dict[str, float]) -> None:
    judge = Judge.model_validate({"model": {"path": "j"}, "minimum": 1, "maximum": 5})
    allowed = {k: probabilities.get(str(k), 0.0) for k in range(1, 6)}
    total = sum(allowed.values())
    if total < 0.01:
        with pytest.raises(UnreadableAnswerError):
            worth(judge, probabilities)
    else:
        expected = sum(k * share for k, share in allowed.items()) / total
        assert worth(judge, probabilities) == pytest.approx((expected - 3) / 2, abs=1e-9)


def test_a_response_cannot_write_itself_into_another_place() -> None:
    judge = Judge.model_validate({"model": {"path": "j"}, "template": "{prompt}|{response}|{maximum}|{other}"})
    asked = replace(sample("any"), prompt_text="{response}")
    assert question(judge, asked, response="{prompt} {maximum}") == "{response}|{prompt} {maximum}|9|{other}"


def test_a_template_asks_by_what_the_prompts_line_holds() -> None:
    template = "{record.answer}|{record.points}|{record.tags}|{response}"
    judge = Judge.model_validate({"model": {"path": "j"}, "template": template})
    record = {"answer": "{response} {record.points}", "points": 3, "tags": ["ü", None]}
    asked = replace(sample("any"), record=json.dumps(record))
    wanted = '{response} {record.points}|3|["ü", null]|{record.answer}'
    assert question(judge, asked, response="{record.answer}") == wanted
    without = replace(sample("any"), record='{"prompt": "p", "question": "q"}')
    with pytest.raises(
        UnaskableError, match=r"asks for \{record.answer\}, but the keys of the prompt are: prompt, question"
    ):
        question(judge, without, response="r")


async def test_a_prompt_without_what_is_asked_for_is_a_failure_of_the_template(url: str) -> None:
    source = source_of(url, template="{record.answer} {response}")
    await source.start()
    try:
        with pytest.raises(RewardError, match="the keys of the prompt are") as caught:
            await source.score(sample("any"))
        assert caught.value.failure.field == "spec.models.reward.judge.template"
    finally:
        await source.close()


@pytest.mark.parametrize("answer", ["", "excellent", "10", "0 of 9, or rather 0"])
def test_an_answer_without_a_rating_is_none(answer: str) -> None:
    with pytest.raises(UnreadableAnswerError):
        written(Judge.model_validate({"model": {"path": "j"}}), answer)


def judged_job(folder: Path, judge: dict[str, Any]) -> RLHFJob:
    document = make_job(folder, folder).model_dump(mode="json", by_alias=True, exclude_none=True)
    document["spec"]["models"]["reward"] = {"judge": judge}
    return RLHFJob.model_validate(document)


def test_a_model_of_the_job_gives_the_expected_rating_of_its_next_token(tmp_path: Path) -> None:
    folder = models.write_policy(tmp_path / "judge", "llama", seed=5)
    template = "{response} from {minimum} to {maximum}:"
    job = judged_job(folder, {"model": {"path": str(folder)}, "template": template, "minimum": 0, "maximum": 3})
    scorer = load_reward(SCORE_REWARD, job.spec, CPU, CPU)
    assert isinstance(scorer, JudgeModelScorer)
    (rating,), (other,) = scorer.score([sample("abc"), sample("d")])
    tokenizer = scorer._tokenizer
    ids = torch.tensor([tokenizer("abc from 0 to 3:")["input_ids"]])
    with torch.no_grad():
        shares = torch.softmax(scorer.model(ids).logits[0, -1].float(), -1).double()
    of_label = [sum(float(shares[i]) for t, i in tokenizer.get_vocab().items() if t.strip("▁Ġ ") == k) for k in "0123"]
    expected = sum(k * share for k, share in enumerate(of_label)) / sum(of_label)
    assert rating == pytest.approx(2 * expected / 3 - 1, abs=1e-6)
    assert -1 <= other <= 1
    assert scorer.score([sample("d"), sample("abc")]) == [other, rating]


def compared(scorer: JudgeModelComparer, texts: Sequence[str]) -> tuple[int, list[float | None]]:
    """Return (passes of two questions, reward of each response)."""
    comparing, passes = scorer.compare([sample(text) for text in texts]), 0
    while True:
        try:
            next(comparing)
        except StopIteration as ended:
            return passes, [None if reward is None else float(reward[0]) for reward in ended.value]
        passes += 1


def test_a_model_of_the_job_compares_every_two_responses_in_both_orders(tmp_path: Path) -> None:
    folder = models.write_policy(tmp_path / "judge", "llama", seed=5)
    judge = {"model": {"path": str(folder)}, "method": "Pairwise", "template": "{first} or {second}:"}
    job = judged_job(folder, judge)
    grouped = {"grpo": {"groupSize": 4, "miniBatchSize": 8}}
    document = job.model_dump(mode="json", by_alias=True, exclude_none=True)
    document["spec"]["algorithm"] = grouped
    spec = RLHFJob.model_validate(document).spec
    scorer = load_reward(SCORE_REWARD, spec, CPU, CPU)
    assert isinstance(scorer, JudgeModelComparer)
    texts = ("abc", "d", "fe01")
    tokenizer = scorer._tokenizer

    def first_by_answer(left: str, right: str) -> float:
        ids = torch.tensor([tokenizer(f"{left} or {right}:")["input_ids"]])
        with torch.no_grad():
            shares = torch.softmax(scorer.model(ids).logits[0, -1].float(), -1).double()
        first, second = (
            sum(float(shares[i]) for t, i in tokenizer.get_vocab().items() if t.strip("\u2581\u0120 ") == k)
            for k in "12"
        )
        return first / (first + second)

    def better(left: str, right: str) -> float:
        return (first_by_answer(left, right) + 1 - first_by_answer(right, left)) / 2

    passes, rewards = compared(scorer, texts)
    wanted = [sum(better(text, other) for other in texts if other != text) / 2 for text in texts]
    assert rewards == pytest.approx(wanted, abs=1e-6)
    assert passes == 3
    assert sum(reward or 0.0 for reward in rewards) == pytest.approx(1.5)
    assert compared(scorer, texts[::-1])[1] == rewards[::-1]
    assert abs(first_by_answer("abc", "abc") - 0.5) > 1e-4, "this judge prefers a place"
    assert compared(scorer, ("abc", "abc"))[1] == pytest.approx([0.5, 0.5])
    assert compared(scorer, ("alone",)) == (0, [None])
    with pytest.raises(WorkError, match="the algorithm samples one: use Direct"):
        load_reward(SCORE_REWARD, job.spec, CPU, CPU)


def test_a_judge_whose_tokenizer_ends_every_text_reads_a_question_that_does_not_end(tmp_path: Path) -> None:
    folder = models.write_policy(tmp_path / "judge", "llama", seed=5)
    judge = {"model": {"path": str(folder)}, "template": "{response}:", "minimum": 0, "maximum": 3}
    scorer = load_reward(SCORE_REWARD, judged_job(folder, judge).spec, CPU, CPU)
    assert isinstance(scorer, JudgeModelScorer)
    expected = scorer.score([sample("abc")])
    tokenizer = models.build_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <eos>", pair="$A $B <eos>", special_tokens=[("<eos>", tokenizer.eos_token_id)]
    )
    tokenizer.save_pretrained(folder)
    scorer = load_reward(SCORE_REWARD, judged_job(folder, judge).spec, CPU, CPU)
    assert isinstance(scorer, JudgeModelScorer)
    assert scorer.score([sample("abc")]) == expected


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ strftime_now('%Y') }}{{ messages[0].content }}", "writes the date of the day"),
        ("{{ ['a', 'b'] | random }}{{ messages[0].content }}", "draws at random"),
        ("{{ messages[0].content[1:] }}", "omits the question"),
        ("{{ raise_exception('no user') }}", "no user"),
    ],
)
def test_a_judge_whose_template_does_not_ask_is_refused(tmp_path: Path, template: str, why: str) -> None:
    folder = models.write_policy(tmp_path / "judge", "llama", seed=5)
    tokenizer = models.build_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    judge = {"model": {"path": str(folder)}, "template": "{response}:", "minimum": 0, "maximum": 3}
    with pytest.raises(WorkError, match=why) as error:
        load_reward(SCORE_REWARD, judged_job(folder, judge).spec, CPU, CPU)
    assert error.value.failure.field == "spec.models.reward.judge.model.path"
