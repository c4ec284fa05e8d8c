"""A reward model with another tokenizer, template or end token reads the conversation in its own form."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.model_folders.models import build_tokenizer, write_policy, write_reward_model
from tests.support.model_folders.special_tokens import tokenizer_that_writes
from tests.support.training.training_ranks import CPU, make_job
from tokenizers import processors
from transformers import AutoModelForSequenceClassification

from rlhf_api.algorithms import ModelRole
from rlhf_api.algorithms.graph import SCORE_REFERENCE, SCORE_REWARD
from rlhf_api.job import RLHFJob
from rlhf_api.job.model_source import ModelSource
from rlhf_common.samples import FIRST_EVALUATION_SAMPLE, SampleKey, ScoringSample
from rlhf_workers.failures import WorkError
from rlhf_workers.inference.rewards.model import RewardModelScorer
from rlhf_workers.inference.rewards.model_text import OwnTokenizer
from rlhf_workers.inference.scorers import load_scorer

MESSAGES = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1="}]
CLOSED = "{% for m in messages %}{{ m.role }}: {{ m.content }}!{% endfor %}"
OPEN = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"


def sample(prompt_text: str, prompt: object = MESSAGES) -> ScoringSample:
    tokens = np.array([3, 4], np.int32)
    record = json.dumps({"messages": prompt})
    return ScoringSample(SampleKey(2, 7, 0), tokens, tokens, prompt_text, "2 yes", record)


def job_of(tmp_path: Path, template: str | None, *, chat: bool, same: bool = False, **more: str) -> RLHFJob:
    actor, reward = write_policy(tmp_path / "actor"), write_reward_model(tmp_path / "reward")
    tokenizer = build_tokenizer()
    if not same:
        tokenizer.add_tokens(["yes"])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(reward)
    prompts = {"path": "prompts.jsonl", "promptKey": "messages", "chatTemplate": chat, **more}
    job = make_job(actor, prompts=prompts)
    models = {"actor": {"path": str(actor)}, "reward": {"model": {"path": str(reward)}}}
    return RLHFJob.model_validate(
        job.model_dump(by_alias=True, exclude_none=True)
        | {"spec": job.spec.model_dump(by_alias=True, exclude_none=True) | {"models": models}}
    )


def scorer_of(job: RLHFJob) -> RewardModelScorer:
    scorer = load_scorer(SCORE_REWARD, job.spec, CPU)
    assert isinstance(scorer, RewardModelScorer)
    return scorer


def expected(job: RLHFJob, ids: list[int]) -> np.ndarray:
    """Return the model's own score of these ids, alone and unpadded."""
    source = job.spec.models.source(ModelRole.REWARD)
    assert source is not None
    model = AutoModelForSequenceClassification.from_pretrained(source.path)
    with torch.no_grad():
        result: np.ndarray = model(torch.tensor([ids])).logits.numpy().reshape(1)
    return result


def ids_of(text: str, *, end: bool) -> list[int]:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["yes"])
    return [*tokenizer(text)["input_ids"], *[tokenizer.eos_token_id] * end]


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add an embedding for the added token."""
    import tests.support.model_folders.models

    monkeypatch.setattr(
        tests.support.model_folders.models,
        "_SMALL",
        {**tests.support.model_folders.models._SMALL, "vocab_size": tests.support.model_folders.models.VOCABULARY + 8},
    )


@pytest.mark.parametrize(("template", "end"), [(CLOSED, False), (OPEN, True)])
def test_messages_are_rendered_by_the_reward_models_template(tmp_path: Path, template: str, end: bool) -> None:
    """A template that ends the response itself is unchanged; others are followed by the end of sequence."""
    job = job_of(tmp_path, template, chat=True)
    mark = "!" if template == CLOSED else ""
    text = f"system: add{mark}user: 1+1={mark}assistant: 2 yes{mark}"
    (score,) = scorer_of(job).score([sample("*add*1+1=*")])
    np.testing.assert_allclose(score, expected(job, ids_of(text, end=end)), atol=1e-4)


def test_a_string_is_a_message_of_the_user_after_the_jobs_system_message(tmp_path: Path) -> None:
    job = job_of(tmp_path, CLOSED, chat=True, systemMessage="add")
    (score,) = scorer_of(job).score([sample("*add*1+1=*", "1+1=")])
    text = "system: add!user: 1+1=!assistant: 2 yes!"
    np.testing.assert_allclose(score, expected(job, ids_of(text, end=False)), atol=1e-4)


def test_plain_text_stays_plain_and_ends_with_the_end_of_sequence(tmp_path: Path) -> None:
    job = job_of(tmp_path, CLOSED, chat=False)
    (score,) = scorer_of(job).score([sample("1+1=")])
    np.testing.assert_allclose(score, expected(job, ids_of("1+1=2 yes", end=True)), atol=1e-4)


def test_the_policys_tokenizer_reads_the_very_tokens(tmp_path: Path) -> None:
    job = job_of(tmp_path, CLOSED, chat=True, same=True)
    (score,) = scorer_of(job).score([sample("*add*1+1=*")])
    np.testing.assert_allclose(score, expected(job, [3, 4, 3, 4]), atol=1e-4)


@pytest.mark.parametrize("source", ["actor", "file"])
def test_a_reward_model_of_the_same_vocabulary_reads_by_its_own_template(
    tmp_path: Path, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    job = job_of(tmp_path, CLOSED, chat=True, same=True)
    policy = build_tokenizer()
    if source == "actor":
        policy.chat_template = OPEN
    else:
        (tmp_path / "template.jinja").write_text(OPEN)
        update = {"chat_template_file": str(tmp_path / "template.jinja")}
        prompts = job.spec.prompts.model_copy(update=update)
        job = job.model_copy(update={"spec": job.spec.model_copy(update={"prompts": prompts})})
    policy.save_pretrained(tmp_path / "actor")
    (score,) = scorer_of(job).score([sample("*add*1+1=*")])
    text = "system: add!user: 1+1=!assistant: 2 yes!"
    np.testing.assert_allclose(score, expected(job, build_tokenizer()(text)["input_ids"]), atol=1e-4)
    assert "by its own tokenizer and chat template: its chat template is not the actor's" in caplog.text

    policy.chat_template = CLOSED
    policy.save_pretrained(tmp_path / "actor")
    (tmp_path / "template.jinja").write_text(CLOSED)
    (score,) = scorer_of(job).score([sample("*add*1+1=*")])
    np.testing.assert_allclose(score, expected(job, [3, 4, 3, 4]), atol=1e-4)
    assert "reads prompts and responses as the actor's tokens" in caplog.text


@pytest.mark.parametrize("chat", [True, False])
def test_a_reward_model_with_another_end_of_sequence_reads_by_its_own(tmp_path: Path, chat: bool) -> None:
    job = job_of(tmp_path, OPEN, chat=chat, same=True)
    policy, own = build_tokenizer(), build_tokenizer()
    own.chat_template = policy.chat_template = OPEN
    own.eos_token = "!"
    policy.save_pretrained(tmp_path / "actor")
    own.save_pretrained(tmp_path / "reward")
    (score,) = scorer_of(job).score([sample("1+1=")])
    text = "system: add" + "user: 1+1=assistant: 2 yes" if chat else "1+1=2 yes"
    wanted = [*own(text, add_special_tokens=False)["input_ids"], own.convert_tokens_to_ids("!")]
    np.testing.assert_allclose(score, expected(job, wanted), atol=1e-4)


def test_a_tokenizer_that_encodes_otherwise_reads_by_its_own(tmp_path: Path) -> None:
    """The same tokens with the same ids, but the tokenizer starts each text with its own token."""
    job = job_of(tmp_path, None, chat=False, same=True)
    own = build_tokenizer()
    begin = processors.TemplateProcessing(single="! $A", special_tokens=[("!", own.convert_tokens_to_ids("!"))])
    own.backend_tokenizer.post_processor = begin
    own.save_pretrained(tmp_path / "reward")
    (score,) = scorer_of(job).score([sample("1+1=")])
    wanted = [own.convert_tokens_to_ids("!"), *build_tokenizer()("1+1=2 yes")["input_ids"], own.eos_token_id]
    np.testing.assert_allclose(score, expected(job, wanted), atol=1e-4)


def test_a_reference_of_another_tokenizer_is_refused_by_the_worker_that_loads_it(tmp_path: Path) -> None:
    """Given as a hub id, which the coordinator may not have."""
    actor, reference = write_policy(tmp_path / "actor"), write_policy(tmp_path / "reference")
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["yes"])
    tokenizer.save_pretrained(actor)
    job = make_job(actor)
    models = job.spec.models.model_copy(update={"reference": ModelSource(path=str(reference))})
    spec = job.spec.model_copy(update={"models": models})
    with pytest.raises(WorkError, match=r"spec.models.reference.path: .*'yes', and its tokenizer does not have it"):
        load_scorer(SCORE_REFERENCE, spec, CPU)


def test_a_reward_model_that_knows_no_template_is_refused_for_messages(tmp_path: Path) -> None:
    job = job_of(tmp_path, None, chat=True)
    with pytest.raises(WorkError, match=r"spec.models.reward.model.path: .* no chat template") as caught:
        load_scorer(SCORE_REWARD, job.spec, CPU)
    assert (caught.value.failure.field, caught.value.failure.exit_code) == ("spec.models.reward.model.path", 21)


def test_a_conversation_that_the_template_refuses_is_named(tmp_path: Path) -> None:
    job = job_of(tmp_path, "{{ raise_exception('no system role') }}", chat=True)
    with pytest.raises(WorkError, match=r"sample 7 of iteration 2 is refused by the chat template of .*no system role"):
        scorer_of(job).score([sample("*add*1+1=*")])


DATED = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}2024{% endif %}"


def test_a_template_writes_the_date_that_it_has_for_any_day(tmp_path: Path) -> None:
    job = job_of(tmp_path, DATED + CLOSED, chat=True)
    (score,) = scorer_of(job).score([sample("*add*1+1=*")])
    text = "2024system: add!user: 1+1=!assistant: 2 yes!"
    np.testing.assert_allclose(score, expected(job, ids_of(text, end=False)), atol=1e-4)


@pytest.mark.parametrize("template", ["{{ strftime_now('%Y') }}", "{{ [1, 2] | random }}"])
def test_a_template_that_is_another_tomorrow_is_refused(tmp_path: Path, template: str) -> None:
    job = job_of(tmp_path, template + CLOSED, chat=True)
    with pytest.raises(WorkError, match=r"spec.models.reward.model.path: the chat template (writes the date|draws at)"):
        load_scorer(SCORE_REWARD, job.spec, CPU)


def test_tools_that_the_template_leaves_out_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = json.dumps({"messages": MESSAGES, "tools": [{"name": "add"}]})
    with_tools = replace(sample("*add*1+1=*"), record=record)
    scorer_of(job_of(tmp_path / "none", CLOSED, chat=True)).score([with_tools, with_tools])
    (warned,) = [line for line in caplog.messages if "does not write the tools" in line]
    assert warned.startswith("spec.models.reward.model.path: its chat template")
    caplog.clear()
    scorer_of(job_of(tmp_path / "all", "{{ tools[0].name if tools }}" + CLOSED, chat=True)).score([with_tools])
    assert "does not write the" not in caplog.text


def test_a_message_that_the_template_leaves_out_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    template = "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}!{% endfor %}"
    scorer_of(job_of(tmp_path, template, chat=True)).score([sample("*add*1+1=*")])
    assert "its chat template does not write the system of sample 7 of iteration 2 as it stands" in caplog.text


def test_a_sample_of_an_evaluation_is_read_by_the_fields_of_its_prompts(tmp_path: Path) -> None:
    job = job_of(tmp_path, CLOSED, chat=True)
    held_out = {"path": "held-out.jsonl", "promptKey": "question", "systemMessage": "add"}
    spec = job.spec.model_dump(by_alias=True, exclude_none=True) | {"evaluation": {"prompts": held_out}}
    job = RLHFJob.model_validate(job.model_dump(by_alias=True, exclude_none=True) | {"spec": spec})
    evaluated = replace(
        sample("*add*1+1=*"),
        key=SampleKey(2, FIRST_EVALUATION_SAMPLE, 0),
        record=json.dumps({"question": "1+1="}),
    )
    (score,) = scorer_of(job).score([evaluated])
    text = "system: add!user: 1+1=!assistant: 2 yes!"
    np.testing.assert_allclose(score, expected(job, ids_of(text, end=False)), atol=1e-4)


@pytest.mark.parametrize("single", ["<bos> $A", "<bos> $A <eos>"])
def test_plain_text_begins_once_and_ends_once(tmp_path: Path, single: str) -> None:
    tokenizer = tokenizer_that_writes(single)
    plain = OwnTokenizer(tokenizer, make_job(tmp_path).spec, "field").tokens(sample("<bos>1+1="))
    assert tokenizer.convert_ids_to_tokens(plain.tolist()) == ["<bos>", *"1+1=2 yes", "<eos>"]
