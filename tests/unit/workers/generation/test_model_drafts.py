"""The drafter with its own model draws the policy's tokens where the two agree, for any earlier input."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.model_folders import models
from tests.support.model_folders.models import build_tokenizer, write_policy
from tests.support.workers.engine_driving import MakeEngine, finish, requests
from tests.support.workers.generation_roles import generation_job

from rlhf_common.samples import Drawing, ResponsePart, SampleRequest
from rlhf_workers.failures import WorkError
from rlhf_workers.generation.engine import EngineLimits, SamplingParameters
from rlhf_workers.generation.speculation.drafter import MATCHES, Drafter, DraftRequest, TakesWeights
from rlhf_workers.generation.speculation.model import ModelDrafter, build_drafter

Load = Callable[[str], tuple[Any, Any]]


def same_model(load: Load, architecture: str, *, rows: int = 8, **sampling: Any) -> ModelDrafter:
    model, _ = load(architecture)
    limits = EngineLimits(rows, 48, 40)
    return ModelDrafter(model, SamplingParameters(**sampling), limits, model.config.vocab_size)


def asked(request: SampleRequest, response: ResponsePart, decoded: int, longest: int) -> DraftRequest:
    text = np.concatenate([request.prompt, response.tokens[:decoded]])
    return DraftRequest(request.key, text, len(request.prompt), longest)


@pytest.mark.parametrize(("architecture", "sampling"), [("llama", {}), ("gemma2", {"temperature": 0.0})])
def test_a_model_that_is_the_policy_drafts_every_token_of_it(
    make_engine: MakeEngine, load: Load, architecture: str, sampling: dict[str, Any]
) -> None:
    samples = requests(5)
    done = finish(make_engine(architecture, **sampling), samples)
    drafter = same_model(load, architecture, **sampling)
    assert isinstance(drafter, Drafter)
    assert isinstance(drafter, TakesWeights)
    for sample in samples:
        drafter.begin(sample)
    random = np.random.default_rng(1)
    for turn in range(24):
        chosen = [sample for sample in samples if random.random() < 0.7 or not turn]
        places = [int(random.integers(0, len(done[sample.key.sample].tokens))) for sample in chosen]
        lengths = [int(random.integers(1, 9)) for _ in chosen]
        wanted = [
            asked(sample, done[sample.key.sample], place, length)
            for sample, place, length in zip(chosen, places, lengths, strict=True)
        ]
        if turn % 3 == 2:  # a text that was never said, to be taken back
            drafter.draft([wanted[0]._replace(tokens=np.append(wanted[0].tokens[:-1], 7).astype(np.int32))])
        for sample, place, length, draft in zip(chosen, places, lengths, drafter.draft(wanted), strict=True):
            rest = done[sample.key.sample].tokens[place : place + length]
            assert draft.tokens[: len(rest)].tolist() == rest.tolist()
            assert 0 <= draft.match < MATCHES


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_a_sample_is_drafted_as_its_request_is_drawn(make_engine: MakeEngine, load: Load, temperature: float) -> None:
    sampling: dict[str, Any] = {"temperature": temperature, "by_request": True, "evaluation_temperature": 0.5}
    kinds = (Drawing.ROLLOUT, Drawing.GREEDY, Drawing.EVALUATION)
    samples = [replace(sample, drawing=kinds[place % 3]) for place, sample in enumerate(requests(6))]
    done = finish(make_engine("llama", **sampling), samples)
    drafter = same_model(load, "llama", **sampling)
    for sample in samples:
        drafter.begin(sample)
    for decoded in (0, 6, 12):
        drafts = drafter.draft([asked(sample, done[sample.key.sample], decoded, 5) for sample in samples])
        for sample, draft in zip(samples, drafts, strict=True):
            rest = done[sample.key.sample].tokens[decoded : decoded + 5]
            assert draft.tokens[: len(rest)].tolist() == rest.tolist(), (sample.drawing, decoded)


def test_a_text_with_a_token_that_the_draft_model_has_not_gets_no_guess(load: Load) -> None:
    drafter, samples = same_model(load, "llama"), requests(2)
    for sample in samples:
        drafter.begin(sample)
    wanted = [DraftRequest(sample.key, sample.prompt, len(sample.prompt), 3) for sample in samples]
    beyond = np.append(wanted[0].tokens, models.VOCABULARY).astype(np.int32)
    none, some = drafter.draft([wanted[0]._replace(tokens=beyond), wanted[1]])
    assert none.tokens.size == 0
    assert some.tokens.size == 3


def test_it_guesses_greedily_once_likeliest_tokens_are_right_more_often(make_engine: MakeEngine, load: Load) -> None:
    samples = requests(3)
    done = finish(make_engine("llama", temperature=0.0), samples)
    drafter = same_model(load, "llama")
    for sample in samples:
        drafter.begin(sample)
    assert not drafter.greedy
    for decoded in range(8):
        drafter.draft([asked(sample, done[sample.key.sample], decoded, 1) for sample in samples])
    assert drafter.greedy
    for sample, draft in zip(
        samples, drafter.draft([asked(each, done[each.key.sample], 8, 4) for each in samples]), strict=True
    ):
        rest = done[sample.key.sample].tokens[8:12]
        assert draft.tokens[: len(rest)].tolist() == rest.tolist()


def test_without_a_row_or_room_nothing_is_drafted_and_a_row_that_is_given_back_serves_again(load: Load) -> None:
    drafter = same_model(load, "llama", rows=1)
    first, second = requests(2)
    drafter.begin(first)
    drafter.begin(second)
    longest = np.full(86, 5, np.int32)
    texts = [DraftRequest(sample.key, sample.prompt, len(sample.prompt), 3) for sample in (first, second)]
    assert [len(draft.tokens) for draft in drafter.draft(texts)] == [3, 0]
    assert len(drafter.draft([DraftRequest(first.key, longest, 48, 8)])[0].tokens) == 2
    drafter.end(first.key)
    drafter.begin(second)
    assert [len(draft.tokens) for draft in drafter.draft(texts)] == [0, 3]


def test_new_weights_draft_by_new_weights(make_engine: MakeEngine, load: Load, tmp_path: Path) -> None:
    samples = requests(2)
    done = finish(make_engine("llama"), samples)
    folder = write_policy(tmp_path / "draft", "llama", seed=5)
    spec = generation_job(folder, speculation={"drafters": ["Model"], "draftModel": {"path": str(folder)}}).spec
    drafter = build_drafter(spec, build_tokenizer(), torch.device("cpu"))
    drafter.begin(samples[0])
    request = asked(samples[0], done[0], 2, 6)
    wanted = done[0].tokens[2:8].tolist()
    assert drafter.draft([request])[0].tokens.tolist() != wanted
    drafter.load_weights(dict(load("llama")[0].named_parameters()))
    assert drafter.draft([request])[0].tokens.tolist() == wanted


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_position_embeddings": 64}, "has 64 positions"),
        ({"tokens": ["z"]}, "the policy's token 38 is 'z', and its tokenizer does not have it"),
        ({"path": "nowhere"}, "there is no such folder"),
    ],
)
def test_a_folder_that_cannot_draft_is_refused_by_its_field(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    tokens, path = changes.pop("tokens", []), changes.pop("path", str(tmp_path / "draft"))
    write_policy(tmp_path / "draft", "llama", **changes)
    for token in tokens:
        file = tmp_path / "draft" / "tokenizer.json"
        file.write_text(file.read_text().replace(f'"{token}"', '"ZZ"'))
    spec = generation_job(tmp_path, speculation={"drafters": ["Model"], "draftModel": {"path": path}}).spec
    with pytest.raises(WorkError, match=said) as raised:
        build_drafter(spec, build_tokenizer(), torch.device("cpu"))
    assert raised.value.failure.field == "spec.generation.speculation.draftModel.path"
