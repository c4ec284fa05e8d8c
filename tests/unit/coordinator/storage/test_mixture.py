"""Mixtures: shares are exact to within one prompt at any time, no prompt is lost, and a replay is exact."""

import hashlib
import json
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.model_folders.models import build_tokenizer

from rlhf_api.algorithms.iteration_prompts import PromptSchedule
from rlhf_api.job import RLHFJobSpec
from rlhf_api.job.rollout import Prompts
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.storage.journal import Journal
from rlhf_coordinator.storage.mixture import Mixture
from rlhf_coordinator.storage.prompt_cache import keep_tokenized, tokenized_before
from rlhf_coordinator.storage.prompts import Prompt, PromptSet, prompts_digest
from rlhf_coordinator.storage.tokenized_prompts import read_prompts

WEIGHTS = st.lists(st.integers(1, 40), min_size=1, max_size=6)
BATCH = 6
"""Number of prompts per iteration."""


@settings(max_examples=100, deadline=None)
@given(WEIGHTS)
def test_after_any_number_of_prompts_a_source_is_less_than_one_from_its_share(weights: list[int]) -> None:
    mixture, total = Mixture(weights), sum(weights)
    counts = [0] * len(weights)
    for number in range(2 * total):
        source, nth = mixture.place(number)
        assert nth == counts[source], "each of a source once, in order"
        counts[source] += 1
        assert mixture.counts(number + 1) == counts
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count * total - (number + 1) * weight) < total
    assert counts == [2 * weight for weight in weights]


def test_the_largest_weights_keep_their_shares() -> None:
    weights = [1000, *range(1, 14), 999, 997]
    assert Mixture(weights).counts(sum(weights)) == weights


def prompt_set(weights: list[int], sizes: list[int], *, shuffle: bool = True, seed: int = 3) -> PromptSet:
    entries = [(source, place) for source, size in enumerate(sizes) for place in range(size)]
    prompts = [Prompt(n, b"", f"{at[0]}.{at[1]}", "", source=at[0]) for n, at in enumerate(entries, 1)]
    return PromptSet(
        prompts, seed=seed, shuffle=shuffle, schedule=PromptSchedule(BATCH), samples_per_prompt=1, weights=weights
    )


def taken(prompts: PromptSet, iterations: range) -> list[str]:
    return [prompts.prompt(iteration, group).text for iteration in iterations for group in range(BATCH)]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=4), st.booleans(), st.data())
def test_every_pass_through_a_source_visits_each_of_its_prompts_once_and_a_replay_is_exact(
    sources: list[tuple[int, int]], shuffle: bool, data: st.DataObject
) -> None:
    weights, sizes = map(list, zip(*sources, strict=True))
    order = taken(prompt_set(weights, sizes, shuffle=shuffle), range(20))
    for source, size in enumerate(sizes):
        own = [text for text in order if text.startswith(f"{source}.")]
        for start in range(0, len(own) - size + 1, size):
            assert len(set(own[start : start + size])) == size
    at = data.draw(st.integers(0, 19))
    resumed = taken(prompt_set(weights, sizes, shuffle=shuffle), range(at, 20))
    assert resumed == order[at * BATCH :], "the position is a function of seed and iteration alone"


def test_a_single_source_is_in_the_order_of_a_single_file() -> None:
    lines = [Prompt(n, b"", f"0.{n - 1}", "") for n in range(1, 12)]
    plain = PromptSet(lines, seed=3, shuffle=True, schedule=PromptSchedule(BATCH), samples_per_prompt=1)
    for weight in (1, 7):
        assert taken(prompt_set([weight], [11]), range(9)) == taken(plain, range(9))
    keys = [hashlib.blake2b(struct.pack("<3Q", 3, 0, entry), digest_size=8).digest() for entry in range(11)]
    first = sorted(range(11), key=lambda entry: int.from_bytes(keys[entry], "little"))
    assert taken(plain, range(2))[:11] == [f"0.{entry}" for entry in first], "as every version before had it"


def test_sources_are_shuffled_apart() -> None:
    order = taken(prompt_set([1, 1], [40, 40]), range(14))
    places = [[text.split(".")[1] for text in order if text.startswith(f"{source}.")][:40] for source in (0, 1)]
    assert places[0] != places[1]


def test_what_takes_the_place_of_dropped_prompts_is_mixed_too_and_new() -> None:
    prompts = prompt_set([3, 1], [30, 30])
    own = {prompts.prompt(2, group).text for group in range(BATCH)}
    added = [prompts.prompt(2, group).text for group in range(BATCH, BATCH + 20)]
    assert len(set(added)) == 20
    assert not own & set(added)
    assert Counter(text[0] for text in added) == {"0": 15, "1": 5}


def test_the_first_prompts_are_in_turns_and_complete() -> None:
    prompts = prompt_set([2, 1], [3, 5])
    assert [prompt.text for prompt in prompts.first(4)] == ["0.0", "0.1", "1.0", "0.2"]
    assert sorted(prompt.text for prompt in prompts.first(99)) == ["0.0", "0.1", "0.2", *(f"1.{n}" for n in range(5))]


def test_passes_are_counted_by_source() -> None:
    prompts = prompt_set([2, 1], [8, 20])
    assert prompts.passes(2) == [12 / 8, 6 / 20]
    assert (prompts.epoch(1), prompts.epoch(2)) == (0, 1)


def files(folder: Path, **contents: list[dict[str, Any]]) -> Prompts:
    for name, lines in contents.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sources: list[dict[str, Any]] = [{"name": name, "path": str(folder / f"{name}.jsonl")} for name in contents]
    sources[-1] |= {"weight": 3, "promptKey": "question"}
    return Prompts.model_validate({"sources": sources, "overlong": "Filter"})


LONG = "say anything you like " * 9


def test_sources_are_read_in_order_under_one_key(tmp_path: Path) -> None:
    prompts = files(
        tmp_path, red=[{"prompt": "red"}, {"prompt": LONG}], blue=[{"question": LONG}, {"question": "blue"}]
    )
    read = read_prompts(prompts, build_tokenizer(), 64)
    assert [(prompt.source, prompt.line, prompt.text, prompt.filtered) for prompt in read] == [
        (0, 1, "red", 1),
        (1, 3, "blue", 1),
    ]
    assert json.loads(read[1].record) == {"prompt": "blue"}
    journal = Journal(tmp_path / "journal")
    keep_tokenized(journal, "a" * 64, read)
    assert tokenized_before(journal, "a" * 64) == read
    several = PromptSet(read, seed=0, shuffle=True, schedule=PromptSchedule(1), samples_per_prompt=1, weights=[1, 3])
    assert several.filtered == [1, 1]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "blue.jsonl has no prompts"),
        ([{"question": LONG}], "blue.jsonl has no line that is short enough: all 1 are longer"),
        ([{"prompt": "a"}], "blue.jsonl line 1 has no key 'question'"),
        ([{"prompt": "a", "question": "b"}], "blue.jsonl line 1 has the key 'prompt' beside 'question', which takes"),
    ],
)
def test_a_bad_source_is_named_by_its_file_and_field(tmp_path: Path, lines: list[Any], message: str) -> None:
    prompts = files(tmp_path, red=[{"prompt": "red"}], blue=lines)
    with pytest.raises(JobError, match=message) as error:
        read_prompts(prompts, build_tokenizer(), 64)
    assert error.value.failure.field == "spec.prompts.sources[1].path"


def test_a_journal_is_of_one_mixture(tmp_path: Path) -> None:
    models = {"actor": {"path": "/m"}, "reward": {"function": {"file": "r.py"}}}
    spec = RLHFJobSpec.model_validate({"algorithm": {"ppo": {}}, "models": models, "prompts": {"path": "p"}})
    prompts = files(tmp_path, red=[{"prompt": "red"}], blue=[{"question": "blue"}])
    assert prompts.sources is not None
    red, blue = prompts.sources
    mixed = [[red, blue], [blue, red], [red, blue.model_copy(update={"weight": 2})], [red]]
    digests = {prompts_digest(spec, prompts.model_copy(update={"sources": sources})) for sources in mixed}
    assert len(digests) == 4
