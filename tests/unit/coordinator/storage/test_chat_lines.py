"""Chats of prompt files: rejected lines, warnings, and the conversion of tools and tool calls."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.model_folders.chat_families_reader import FAMILIES
from tests.support.model_folders.models import build_tokenizer

from rlhf_api.job.evaluation import HeldOutPrompts
from rlhf_api.job.rollout import Prompts
from rlhf_common.names import ExitCode
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.storage.prompts import Prompt
from rlhf_coordinator.storage.tokenized_prompts import read_prompts

DEEP = "[" * 100_000
ASKED = {"role": "user", "content": "What is 2+2?"}
ANSWERED = {"role": "assistant", "content": "4"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"left": 2, "right": "2"}}}
CALLED = [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "4"}]


def read(folder: Path, *records: Any, family: str = "chatml", **fields: Any) -> list[Prompt]:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer = build_tokenizer()
    tokenizer.chat_template, tokenizer.bos_token = FAMILIES[family], "<s>"
    return read_prompts(Prompts(path=str(path), chat_template=True, **fields), tokenizer, 1 << 20)


def refused(folder: Path, prompt: Any, **fields: Any) -> str:
    record = {"prompt": prompt, **fields.pop("record", {})}
    with pytest.raises(JobError) as error:
        read(folder, {"prompt": "fine"}, record, **fields)
    failure = error.value.failure
    assert (failure.exit_code, failure.field) == (ExitCode.BAD_DATA, "spec.prompts.path")
    assert "data.jsonl line 2 " in failure.message
    return failure.message


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([ASKED, ANSWERED], "ends with a message of the assistant under 'prompt', which the policy would answer"),
        ([], "has an empty list of messages under 'prompt'"),
        ([{"role": "user"}], "the content of message 1 under 'prompt' is null, and must be a string"),
        ([{"content": "2"}], "message 1 under 'prompt' has no role"),
        ([ASKED, {"role": "assistant", "content": None}], "the content of message 2 under 'prompt' is null"),
        ([{"role": "user", "content": [{"type": "text", "text": "2"}]}], "message 1 under 'prompt' is a list"),
        ([{**ASKED, "tool_calls": [CALL]}], "has tool_calls in message 1 under 'prompt', whose role is user"),
        ([ASKED, {"role": "assistant", "tool_calls": [{"function": {}}]}], "has a tool call without a name"),
        ([ASKED, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}], "that are no JSON"),
        ([ASKED, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": DEEP}]}], "it is nested too deep"),
    ],
)
def test_a_chat_that_the_policy_cannot_answer_is_refused(tmp_path: Path, prompt: Any, words: str) -> None:
    assert words in refused(tmp_path, prompt)


def test_a_chat_in_which_no_one_asks_is_warned_of(tmp_path: Path) -> None:
    (prompt,) = read(tmp_path, {"prompt": [{"role": "system", "content": "Be brief."}]})
    (warning,) = prompt.warnings
    assert "line 1 has no message of the user under 'prompt': add the user's message" in warning


@pytest.mark.parametrize(
    ("family", "text", "mark"),
    [
        ("chatml", "<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n", "<|im_start|>"),
        ("llama3", "<|start_header_id|>user<|end_header_id|>\n\n2+2<|eot_id|>", "<|start_header_id|>"),
        ("mistral", "[INST] 2+2 [/INST]", "[INST]"),
        ("gemma", "<start_of_turn>user\n2+2<end_of_turn>", "<start_of_turn>"),
        ("zephyr", "<|user|>\n2+2", "<|user|>"),
        ("deepseek-r1", "<｜User｜>2+2<｜Assistant｜>", "<｜User｜>"),
        ("granite", "<|start_of_role|>user<|end_of_role|>2+2", "<|start_of_role|>"),
    ],
)
def test_a_prompt_that_is_rendered_already_is_warned_of_with_its_first_line(
    tmp_path: Path, family: str, text: str, mark: str
) -> None:
    prompts = read(tmp_path, {"prompt": "2+2"}, {"prompt": text}, {"prompt": "a"}, {"prompt": text}, family=family)
    (warning,) = prompts[0].warnings
    assert (
        f"data.jsonl line 2 holds {mark}, a mark of the chat template, under 'prompt' (and 1 more lines): " in warning
    )
    assert "spec.prompts.chatTemplate to false" in warning


def test_words_as_marks_are_known_when_they_surround_the_prompt(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:")
    fields: dict[str, Any] = {"chat_template_file": str(file)}
    assert read(tmp_path, {"prompt": "user: 2+2\nassistant:"}, **fields)[0].warnings
    assert not read(tmp_path, {"prompt": "Is it user: or assistant: that begins?"}, **fields)[0].warnings


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_that_speaks_of_thinking_is_not_warned_of(tmp_path: Path, family: str) -> None:
    asked = "Reason in <think> and </think>, answer in <answer>. Is a < b > c [1]?"
    assert read(tmp_path, {"prompt": asked}, family=family)[0].warnings == ()


def test_a_message_that_the_template_leaves_out_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{% for m in messages if m.role == 'user' %}{{ m.content }}\n{% endfor %}")
    prompt = [{"role": "system", "content": "Be brief."}, ASKED]
    message = refused(tmp_path, prompt, chat_template_file=str(file))
    assert "has a message of role system under 'prompt' that the chat template does not write as it stands" in message
    assert "spec.prompts.chatTemplateFile" in message


def test_a_system_message_that_switches_the_template_is_warned_of(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(
        "{% for m in messages if m.role == 'user' %}{{ m.content }}\n{% endfor %}"
        "{% if messages[0].content == '/no_think' %}<think></think>{% endif %}"
    )
    prompt = [{"role": "system", "content": "/no_think"}, ASKED]
    (read_prompt,) = read(tmp_path, {"prompt": prompt}, chat_template_file=str(file))
    (warning,) = read_prompt.warnings
    assert "has a message of role system under 'prompt' that the chat template does not write as it stands" in warning


def test_messages_as_json_text_are_warned_of(tmp_path: Path) -> None:
    (prompt,) = read(tmp_path, {"prompt": json.dumps([ASKED])})
    (warning,) = prompt.warnings
    assert "holds the JSON text of messages under 'prompt', which is read as one message of the user" in warning


def test_an_earlier_answer_without_its_reasoning_is_warned_of(tmp_path: Path) -> None:
    thought = {"role": "assistant", "content": "<think>2 and 2</think>4"}
    (prompt,) = read(tmp_path, {"prompt": [ASKED, thought, ASKED]}, family="qwen3")
    assert "2 and 2" not in prompt.text
    (warning,) = prompt.warnings
    assert "has a message of role assistant under 'prompt' that the chat template does not write" in warning


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [{**TOOL, "strict": None}]])
@pytest.mark.parametrize("family", ["chatml", "qwen3", "llama3", "mistral", "glm", "granite"])
def test_tools_of_a_line_are_rendered(tmp_path: Path, family: str, tools: Any) -> None:
    (prompt,) = read(tmp_path, {"prompt": "2+2", "tools": tools}, family=family)
    assert '"name": "add"' in prompt.text
    assert "strict" not in prompt.text


@pytest.mark.parametrize("tools", [None, [], "", "[]"])
def test_a_line_without_tools_may_have_the_key(tmp_path: Path, tools: Any) -> None:
    with_key, without = read(tmp_path, {"prompt": "2+2", "tools": tools}, {"prompt": "2+2"}, family="zephyr")
    assert with_key.text == without.text


@pytest.mark.parametrize(
    ("tools", "family", "words"),
    [
        ([TOOL], "zephyr", "has tools, which the chat template does not write; give a template with spec.prompts."),
        (["add"], "chatml", "has tools that are no list of objects; write a list of JSON schemas"),
        ("add", "chatml", "has tools that are no JSON"),
        (DEEP, "chatml", "has tools that are no JSON (it is nested too deep)"),
        ("[" * 300 + "]" * 300, "chatml", "has tools that are no JSON (it has more than 64 levels)"),
        ({"add": 1}, "chatml", "has tools that are no list of objects"),
    ],
)
def test_tools_that_are_not_rendered_are_refused(tmp_path: Path, tools: Any, family: str, words: str) -> None:
    assert words in refused(tmp_path, "2+2", record={"tools": tools}, family=family)


def test_tools_that_columns_leave_out_are_the_readers_own(tmp_path: Path) -> None:
    (prompt,) = read(tmp_path, {"prompt": "2+2", "tools": ["add"]}, family="zephyr", columns=["prompt"])
    assert "add" not in prompt.text


@pytest.mark.parametrize("arguments", [{"left": 2, "right": "2"}, '{"left": 2, "right": "2"}'])
def test_tool_calls_and_their_results_are_rendered(tmp_path: Path, arguments: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    chat = [ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}, CALLED[2]]
    for family in ("chatml", "qwen3", "llama3", "glm"):
        (prompt,) = read(tmp_path, {"prompt": chat}, family=family)
        assert "None" not in prompt.text
        assert prompt.text.count("add") == 1
        assert '"{' not in prompt.text, "arguments are JSON once"


def test_tool_calls_that_the_template_does_not_read_are_refused(tmp_path: Path) -> None:
    assert "has tool_calls in a message, which the chat template does not read" in refused(
        tmp_path, CALLED, family="zephyr"
    )


def test_other_keys_that_the_template_does_not_read_are_warned_of(tmp_path: Path) -> None:
    (prompt,) = read(tmp_path, {"prompt": [{**ASKED, "weight": 2, "tool_calls": None, "name": None}]})
    (warning,) = prompt.warnings
    assert "has weight in a message, which the chat template does not read: the model does not see it" in warning


@pytest.mark.parametrize(
    "template", ["{{ strftime_now('%d %B %Y') }}", "{{ messages[0].content }}{{ ['a', 'b'] | random }}"]
)
def test_a_template_that_is_another_tomorrow_is_refused(tmp_path: Path, template: str) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(template)
    with pytest.raises(JobError, match=r"the chat template (writes the date of the day|draws at random)") as error:
        read(tmp_path, {"prompt": "2+2"}, chat_template_file=str(file))
    assert error.value.failure.field == "spec.prompts.chatTemplateFile"


def test_a_template_that_is_given_its_date_is_rendered(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(
        "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
        "{{ date_string }}: {{ messages[0].content }}"
    )
    fields: dict[str, Any] = {
        "chat_template_file": str(file),
        "chat_template_arguments": {"date_string": "26 Jul 2024"},
    }
    assert read(tmp_path, {"prompt": "2+2"}, **fields)[0].text == "26 Jul 2024: 2+2"


def warnings_of(folder: Path, prompt: Any, template: str, **record: Any) -> str:
    file = folder / "chat.jinja"
    file.write_text(template)
    return "; ".join(read(folder, {"prompt": prompt, **record}, chat_template_file=str(file))[0].warnings)


TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
BEGUN = TURNS + "{% if add_generation_prompt %}<assistant>{% endif %}"


def test_a_template_that_does_not_begin_the_answer_is_warned_of(tmp_path: Path) -> None:
    warning = warnings_of(tmp_path, "2+2", TURNS)
    assert "is rendered without '<assistant>', which the chat template writes before every answer" in warning
    assert not warnings_of(tmp_path, "2+2", BEGUN)
    marks = "{% for m in messages %}{{ '[' + m.content + ']' if m.role == 'user' else m.content }}{% endfor %}"
    assert not warnings_of(tmp_path, "2+2", marks), "the answer follows the prompt at once"
    thought = BEGUN.replace("{{ m.content }}", "{{ '<think></think>' if m.role == 'assistant' }}{{ m.content }}")
    assert not warnings_of(tmp_path, "2+2", thought)


@pytest.mark.parametrize("role", ["gpt", "model", "Assistant", "AI"])
def test_an_answer_by_another_name_of_the_assistant_is_refused_at_the_end(tmp_path: Path, role: str) -> None:
    message = {"role": role, "content": "4"}
    assert "ends with a message of the assistant" in refused(tmp_path, [ASKED, message])
    warning = warnings_of(tmp_path, [ASKED, message, ASKED], BEGUN)
    assert f"has a message of role {role!r} under 'prompt', which is not one of system, developer, user" in warning


def test_a_role_that_the_template_names_is_its_own(tmp_path: Path) -> None:
    prompt = [ASKED, ANSWERED, {"role": "ipython", "content": "4"}]
    assert "role 'ipython'" in warnings_of(tmp_path, prompt, BEGUN)
    assert not warnings_of(tmp_path, prompt, BEGUN + "{% if messages[-1].role == 'ipython' %}{% endif %}")


def test_a_short_message_that_the_template_leaves_out_is_refused(tmp_path: Path) -> None:
    """Its text occurs elsewhere in the prompt."""
    file = tmp_path / "chat.jinja"
    file.write_text("{% for m in messages if m.role == 'user' %}{{ m.content }}\n{% endfor %}")
    prompt = [{"role": "system", "content": "2"}, ASKED]
    assert "has a message of role system under 'prompt'" in refused(tmp_path, prompt, chat_template_file=str(file))
    file.write_text("{% for m in messages[-1:] %}{{ m.content }}\n{% endfor %}")
    assert "role user" in refused(tmp_path, [ASKED, ANSWERED, ASKED], chat_template_file=str(file))


def test_an_empty_message_is_warned_of(tmp_path: Path) -> None:
    assert "has an empty message of role user under 'prompt'" in warnings_of(tmp_path, " ", BEGUN)


def test_a_chat_that_begins_with_the_developer_gets_no_system_message(tmp_path: Path) -> None:
    prompt = [{"role": "developer", "content": "Be loud."}, ASKED]
    file = tmp_path / "chat.jinja"
    file.write_text(BEGUN)
    (read_prompt,) = read(tmp_path, {"prompt": prompt}, system_message="Be brief.", chat_template_file=str(file))
    assert "Be loud." in read_prompt.text
    assert "Be brief." not in read_prompt.text


def test_space_that_the_template_changes_is_warned_of(tmp_path: Path) -> None:
    template = BEGUN.replace("{{ m.content }}", "{{ m.content | replace('\n', ' ') }}")
    warning = warnings_of(tmp_path, "a\nb", template)
    assert "has spaces or line breaks under 'prompt' that the chat template changes" in warning
    assert not warnings_of(tmp_path, "a b\n", template)


def test_tools_in_a_message_are_not_those_of_the_line(tmp_path: Path) -> None:
    template = "{{ tools | tojson if tools }}" + BEGUN
    assert "has tools in a message" in warnings_of(tmp_path, [{**ASKED, "tools": [TOOL]}], template)


def test_a_tool_that_the_template_leaves_out_is_refused(tmp_path: Path) -> None:
    other = {"type": "function", "function": {"name": "multiply"}}
    file = tmp_path / "chat.jinja"
    file.write_text("{{ tools[0] | tojson if tools }}" + BEGUN)
    record = {"tools": [TOOL, other]}
    message = refused(tmp_path, "2+2", record=record, chat_template_file=str(file))
    assert "has the tool 'multiply', which the chat template does not write" in message


def test_words_of_a_tool_that_the_template_leaves_out_are_warned_of(tmp_path: Path) -> None:
    function = {"name": "add", "description": "adds two", "parameters": {"properties": {"left": {}}}}
    names = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}" + BEGUN
    warning = warnings_of(tmp_path, "2+2", names, tools=[{"type": "function", "function": function}])
    assert "has 'adds two' in a tool, which the chat template does not write" in warning
    whole = "{{ tools | tojson if tools }}" + BEGUN
    assert not warnings_of(tmp_path, "2+2", whole, tools=[{"type": "function", "function": function}])


def test_nulls_that_a_table_adds_to_arguments_are_warned_of(tmp_path: Path) -> None:
    rows = [[ASKED, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}, ASKED]
            for arguments in ({"x": 1}, {"y": 2})]  # fmt: skip
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({"prompt": rows}), path)
    tokenizer = build_tokenizer()
    tokenizer.chat_template, tokenizer.bos_token = FAMILIES["chatml"], "<s>"
    [warning] = read_prompts(Prompts(path=str(path), chat_template=True), tokenizer, 1 << 20)[0].warnings
    assert "row 1 has null in arguments of f, and the policy reads it (and 1 more rows)" in warning


def test_errors_name_the_block_of_the_evaluation(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": [ASKED, ANSWERED]}) + "\n")
    tokenizer = build_tokenizer()
    tokenizer.chat_template = FAMILIES["chatml"]
    with pytest.raises(JobError) as error:
        read_prompts(HeldOutPrompts(path=str(path), chat_template=True), tokenizer, 1 << 20)
    assert error.value.failure.field == "spec.evaluation.prompts.path"
    arguments = HeldOutPrompts(path=str(path), chat_template=True, chat_template_arguments={"unread": 1})
    with pytest.raises(JobError) as error:
        read_prompts(arguments, tokenizer, 1 << 20)
    assert error.value.failure.field == "spec.evaluation.prompts.chatTemplateArguments.unread"
