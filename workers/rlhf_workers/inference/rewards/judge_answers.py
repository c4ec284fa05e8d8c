"""What a judge is asked, and what its answer comes to: templates filled, ratings weighed by their probabilities.

Rule: pure. What prompts, responses and records hold is put in once and never looked at again, so no response can write
itself into another's place. An answer that gives the ratings next to no probability is a failure, not a number.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final

from rlhf_api.job.judge import Judge
from rlhf_common.samples import ScoringSample

LEAST_SHARE: Final = 0.01
"""Of the probability, that all ratings have together: below, the judge answers something else."""
_PLACE: Final = re.compile(r"\{(prompt|response|first|second|minimum|maximum)\}|\{record\.([^{}.]+)\}")
_NUMBER: Final = re.compile(r"\d+")
_SPACES: Final = " \t\n\u2581\u0120\u010a"
"""Blanks, and how tokenizers write them: U+2581 (sentencepiece), U+0120 and U+010A (bytes as letters)."""


class UnreadableAnswerError(ValueError):
    """An answer that holds no rating; its text says what it holds."""


class UnaskableError(ValueError):
    """A template asks for what a prompt's record has not; its text says what."""


def question(judge: Judge, sample: ScoringSample, **responses: str) -> str:
    """Return what the judge is asked of a sample's prompt: its template with `response`, or `first` and `second`.

    A place {record.answer} is filled with the value of that key in the prompt's record: text as it is, anything else as
    JSON. UnaskableError where the record has no such key.
    """
    values = {"prompt": sample.prompt_text, "minimum": str(judge.minimum), "maximum": str(judge.maximum), **responses}
    record: dict[str, Any] = {}

    def filled(place: re.Match[str]) -> str:
        name, key = place.groups()
        if key is None:
            return values.get(name, place[0])
        if not record:
            record.update(json.loads(sample.record or "{}"))
        if key not in record:
            known = ", ".join(sorted(record)) or "none"
            raise UnaskableError(f"the judge's template asks for {place[0]}, but the keys of the prompt are: {known}")
        value = record[key]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return _PLACE.sub(filled, judge.question)


def label_of(token: str) -> str:
    """Return a token of a vocabulary without the blanks before and behind it."""
    return token.strip(_SPACES)


def worth(judge: Judge, probabilities: Mapping[str, float]) -> float:
    """Return what an answer is worth, by the probabilities of its labels: sum of p worth / sum of p.

    UnreadableAnswerError where the labels have next to no probability together.
    """
    labels = judge.labels
    share = math.fsum(probabilities.get(label, 0.0) for label in labels)
    if not share >= LEAST_SHARE:
        raise UnreadableAnswerError(
            f"the answers {', '.join(labels)} have {share:.2g} of the probability together, at least {LEAST_SHARE} is "
            "needed: does the template ask for one of them, as the first word?"
        )
    return math.fsum(probabilities.get(label, 0.0) * value for label, value in labels.items()) / share


def of_both_orders(as_first: float, as_second: float) -> float:
    """Return the probability that a response is better than another, by the answers with it as the first and with it as
    the second: what a judge gives to a place cancels out."""
    return (as_first + 1 - as_second) / 2


def mean_wins(count: int, better: Mapping[tuple[int, int], float]) -> list[float | None]:
    """Return of each of `count` responses the mean probability to be better than another; None where there is no other.
    `better`: (one, other) -> that the one is, of every two."""
    wins: list[list[float]] = [[] for _ in range(count)]
    for (one, other), probability in better.items():
        wins[one].append(probability)
        wins[other].append(1 - probability)
    return [sum(own) / len(own) if own else None for own in wins]


def written(judge: Judge, answer: str) -> float:
    """Return what a written answer is worth: its last number. UnreadableAnswerError where that is no label."""
    numbers = _NUMBER.findall(answer)
    if not numbers or numbers[-1] not in judge.labels:
        what = f"its last number is {numbers[-1][:20]}" if numbers else "it holds no number"
        raise UnreadableAnswerError(f"the answer is none of {', '.join(judge.labels)}: {what}")
    return judge.labels[numbers[-1]]


def first_probabilities(choice: Mapping[str, Any]) -> dict[str, float]:
    """Return label -> probability of the first token of a choice of OpenAI's completions, chat or not.

    UnreadableAnswerError where the choice has no log-probabilities.
    """
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, Mapping):
        raise UnreadableAnswerError("it has no logprobs: a server that gives none needs read: Answer")
    try:
        if isinstance(content := logprobs.get("content"), list):
            pairs = [(entry["token"], entry["logprob"]) for entry in content[0]["top_logprobs"]]
        else:
            pairs = list(logprobs["top_logprobs"][0].items())
        result: dict[str, float] = {}
        for token, logprob in pairs:
            label = label_of(str(token))
            result[label] = result.get(label, 0.0) + math.exp(min(float(logprob), 0.0))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UnreadableAnswerError(f"its logprobs are of no known form ({type(error).__name__}: {error})") from error
    return result
