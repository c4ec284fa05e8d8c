"""Special tokens of prompts and responses: the tokenizer adds none that the model must not read, and drops none."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.model_folders.special_tokens import tokenizer_that_writes
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from rlhf_api.job.rollout import Prompts
from rlhf_common.names import ExitCode
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.storage.policy_limits import PolicyLimits
from rlhf_coordinator.storage.prompts import Prompt
from rlhf_coordinator.storage.tokenized_prompts import UNLIMITED, read_prompts


def read(
    tmp_path: Path,
    tokenizer: Any,
    *records: Any,
    keys: tuple[str, ...] = (),
    limits: PolicyLimits = UNLIMITED,
    **fields: Any,
) -> list[Prompt]:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_prompts(Prompts(path=str(path), **fields), tokenizer, 64, keys, 64, limits=limits)


def words(tokenizer: Any, tokens: bytes) -> str:
    return " ".join(tokenizer.convert_ids_to_tokens(np.frombuffer(tokens, "<i4").tolist()))


@pytest.mark.parametrize("single", ["<bos> $A", "<bos> $A <eos>"])
def test_a_plain_prompt_begins_once_and_does_not_end(tmp_path: Path, single: str) -> None:
    tokenizer = tokenizer_that_writes(single)
    prompts = read(tmp_path, tokenizer, {"prompt": "1+"}, {"prompt": "<bos>1+"})
    assert [words(tokenizer, prompt.tokens) for prompt in prompts] == ["<bos> 1 +"] * 2


def test_a_response_follows_the_prompt_of_a_tokenizer_that_ends_every_text(tmp_path: Path) -> None:
    tokenizer = tokenizer_that_writes("<bos> $A <eos>")
    (prompt,) = read(tmp_path, tokenizer, {"prompt": "<bos>1+", "response": "2"}, keys=("response",))
    assert words(tokenizer, prompt.tokens) == "<bos> 1 +"
    assert words(tokenizer, prompt.responses[0].tokens) == "2 <eos>"


def test_a_chat_template_that_writes_the_first_token_writes_it_alone(tmp_path: Path) -> None:
    tokenizer = tokenizer_that_writes("<bos> $A <eos>")
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}={% endfor %}"
    (prompt,) = read(tmp_path, tokenizer, {"prompt": "1+"}, chat_template=True)
    assert words(tokenizer, prompt.tokens) == "<bos> 1 + ="


TURNS = "{% for m in messages %}x{{ m.content }}<end>\n{% endfor %}{% if add_generation_prompt %}x{% endif %}"


def responses(tmp_path: Path, *said: Any, stops: str = "", template: str | None = None) -> list[str]:
    tokenizer = tokenizer_that_writes("$A", "<end>")
    tokenizer.chat_template = template
    limits = PolicyLimits(stops=frozenset(tokenizer.convert_tokens_to_ids(stops.split())))
    records = [{"prompt": "1", "response": response} for response in said]
    fields: dict[str, Any] = {"keys": ("response",), "limits": limits, "chat_template": template is not None}
    return [words(tokenizer, prompt.responses[0].tokens) for prompt in read(tmp_path, tokenizer, *records, **fields)]


def test_text_after_an_end_inside_of_a_response_stays(tmp_path: Path) -> None:
    assert responses(tmp_path, "2<eos>3", "2<eos>", "2<eos>\n", "<eos>2<eos>") == [
        "2 <eos> 3 <eos>",
        "2 <eos>",
        "2 <eos> \n <eos>",
        "<eos> 2 <eos>",
    ]


def test_a_response_ends_where_generation_stops(tmp_path: Path) -> None:
    assert responses(tmp_path, "2<end>", "2<end>3", "2", stops="<end>") == ["2 <end>", "2 <end> 3 <eos>", "2 <eos>"]


def test_turns_of_a_chat_stay_up_to_the_last_end(tmp_path: Path) -> None:
    turns = [
        {"role": "assistant", "content": "2"},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "4"},
    ]
    written = responses(tmp_path, turns, "2<end>3", "2", stops="<end>", template=TURNS)
    assert written == ["2 <end> \n x 3 <end> \n x 4 <end>", "2 <end> 3 <end>", "2 <end>"]


def test_a_chat_template_whose_turns_end_where_generation_does_not_stop_is_warned_of(tmp_path: Path) -> None:
    tokenizer = tokenizer_that_writes("$A", "<end>")
    tokenizer.chat_template = TURNS
    end, eos = tokenizer.convert_tokens_to_ids("<end>"), tokenizer.eos_token_id

    def warned(prompts: str = "1", **fields: Any) -> tuple[str, ...]:
        limits = PolicyLimits(**{"stops": frozenset({eos})} | fields)
        return read(tmp_path, tokenizer, {"prompt": prompts}, chat_template=True, limits=limits)[0].warnings

    [warning] = warned()
    assert warning == (
        f"{tmp_path / 'data.jsonl'} is rendered by a chat template that ends a turn with '<end>', and generation stops "
        f"only at '<eos>': name {end} in spec.rollout.stopTokenIds, or make it the tokenizer's eos_token"
    )
    assert warned(stops=frozenset({eos, end})) == ()
    assert warned(stop_strings=("end>",)) == ()
    tokenizer.chat_template = tokenizer.chat_template.replace("<end>", "<eos>")
    assert warned() == ()
    tokenizer.chat_template = tokenizer.chat_template.replace("<eos>", "!")
    assert warned() == (), "plain text is no mark"
    tokenizer.chat_template = "{{ messages[1].no.content }}" + tokenizer.chat_template
    with pytest.raises(JobError, match="is refused by the chat template"):
        warned()


def test_a_token_beyond_the_vocabulary_is_refused_by_line_and_key(tmp_path: Path) -> None:
    tokenizer = tokenizer_that_writes("$A", "<tag>")
    tag = tokenizer.convert_tokens_to_ids("<tag>")
    records = {"prompt": "1", "response": "2"}, {"prompt": "1", "response": "<tag>2"}
    assert read(tmp_path, tokenizer, *records, keys=("response",), limits=PolicyLimits(vocabulary=tag + 1))
    with pytest.raises(
        JobError, match=rf"line 2 has the token '<tag>' under 'response', whose id is {tag}, and"
    ) as error:
        read(tmp_path, tokenizer, *records, keys=("response",), limits=PolicyLimits(vocabulary=tag))
    assert error.value.failure.exit_code == ExitCode.BAD_DATA


def test_a_sequence_beyond_the_positions_is_refused_by_line(tmp_path: Path) -> None:
    tokenizer = tokenizer_that_writes("$A")
    records = {"prompt": "1", "response": "23"}, {"prompt": "1", "response": "234"}
    with pytest.raises(JobError, match="line 2 has 5 tokens of prompt and response under 'response', and the model of"):
        read(tmp_path, tokenizer, *records, keys=("response",), limits=PolicyLimits(positions=4))
    prompts = [{"prompt": "1"}, {"prompt": "1+2"}, {"prompt": "123"}]
    words_of_it = r"64 \+ maxResponseTokens 64 = 128 .* longest prompt, .* line 2, has 3"
    with pytest.raises(JobError, match=words_of_it) as error:
        read(tmp_path, tokenizer, *prompts, limits=PolicyLimits(positions=127, generates=True))
    assert (error.value.failure.reason, error.value.failure.exit_code) == ("ContextTooShort", ExitCode.USAGE)
    assert error.value.failure.field == "spec.rollout.maxResponseTokens"


@pytest.mark.parametrize(
    ("template", "prompt", "warning"),
    [
        (None, "1+", None),
        (None, "1<eos>+", None),
        (
            None,
            "1+<eos>",
            "line 1 ends with '<eos>', at which generation stops: remove it, or let the chat template begin",
        ),
        ("{{ bos_token }}{{ messages[0].content }}=", "1+", None),
        (
            "{{ messages[0].content }}=",
            "1+",
            "line 1 is rendered without '<bos>', with which the tokenizer begins a text",
        ),
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "1+", "line 1 ends with '<eos>', at which"),
    ],
)
def test_a_prompt_that_begins_or_ends_strangely_is_warned_of(
    tmp_path: Path, template: str | None, prompt: str, warning: str | None
) -> None:
    tokenizer = tokenizer_that_writes("<bos> $A <eos>")
    tokenizer.chat_template = template
    start, end = tokenizer.convert_tokens_to_ids(["<bos>", "<eos>"])
    limits = PolicyLimits(stops=frozenset({end}), start=(start,))
    (read_one,) = read(tmp_path, tokenizer, {"prompt": prompt}, chat_template=template is not None, limits=limits)
    assert len(read_one.warnings) == (warning is not None)
    assert warning is None or warning in read_one.warnings[0]


def test_characters_that_the_tokenizer_does_not_know_are_warned_of(tmp_path: Path) -> None:
    tokenizer = tokenizer_that_writes("$A")
    records = [{"prompt": "1", "response": response} for response in ("2", "<unk>", "\U0001f600", "\u00e9\u00e8")]
    limits = PolicyLimits(unknown=tokenizer.unk_token_id)
    (warning,) = read(tmp_path, tokenizer, *records, keys=("response",), limits=limits)[0].warnings
    assert "line 3 has characters under 'response' that the tokenizer does not know" in warning
    assert "reads '<unk>' (and 1 more lines): remove them" in warning


def test_a_response_of_characters_that_flow_into_the_prompts_is_not_lost(tmp_path: Path) -> None:
    """A unigram model encodes neighbouring unknown characters as one token."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("a", -1.0)]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.Unigram(pieces, unk_id=0)), unk_token="<unk>", eos_token="</s>"
    )
    (prompt,) = read(tmp_path, tokenizer, {"prompt": "é", "response": "é"}, keys=("response",))
    assert words(tokenizer, prompt.responses[0].tokens) == "<unk> </s>"


def test_a_prompt_that_begins_with_some_of_the_first_tokens_has_each_once(tmp_path: Path) -> None:
    tokenizer = tokenizer_that_writes("<bos> <en> $A", "<en>")
    prompts = read(tmp_path, tokenizer, {"prompt": "1"}, {"prompt": "<bos>1"}, {"prompt": "<bos><en>1"})
    assert [words(tokenizer, prompt.tokens) for prompt in prompts] == ["<bos> <en> 1"] * 3
