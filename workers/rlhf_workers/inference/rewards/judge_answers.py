"""Fills templates with questions to a judge, and converts its answers to rewards. Pure.

Rule: prompts, responses and records are inserted once and not parsed again, so no response can write into another's
place.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final

from rlhf_api.job.judge import Judge
from rlhf_common.samples import ScoringSample

LEAST_SHARE: Final = 0.01
"""Minimum total probability of all labels; below it, the answer is a failure."""
_PLACE: Final = re.compile(r"\{(prompt|response|first|second|minimum|maximum)\}|\{record\.([^{}.]+)\}")
_NUMBER: Final = re.compile(r"\d+")
_SPACES: Final = " \t\n\u2581\u0120\u010a"
"""Blanks as tokenizers write them: U+2581 (sentencepiece), U+0120 and U+010A (bytes as letters)."""


class UnreadableAnswerError(ValueError):
    """An answer without a rating; the text describes it."""


class UnaskableError(ValueError):
    """A template uses a key that the prompt's record lacks; the text names it."""


def question(judge: Judge, sample: ScoringSample, **responses: str) -> str:
    """Return the question about a sample: the template filled with `response`, or `first` and `second`.

    {record.answer} becomes the value of that key in the prompt's record: text unchanged, anything else as JSON. Raises
    UnaskableError without that key.
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
            keys = ", ".join(sorted(record)) or "none"
            raise UnaskableError(f"the judge's template asks for {place[0]}, but the keys of the prompt are: {keys}")
        value = record[key]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return _PLACE.sub(filled, judge.question)


def label_of(token: str) -> str:
    """Return a vocabulary token without blanks at its ends."""
    return token.strip(_SPACES)


def worth(judge: Judge, probabilities: Mapping[str, float]) -> float:
    """Return the value of an answer from the probabilities of its labels: sum of p value / sum of p.

    Raises UnreadableAnswerError if the labels have almost no probability together.
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
    """Return the probability that a response is better, from the answers with it in first and in second place."""
    return (as_first + 1 - as_second) / 2


def mean_wins(count: int, better: Mapping[tuple[int, int], float]) -> list[float | None]:
    """Return each response's mean probability of being better than another; None if there is no other.

    `better`: (first, other) -> probability that `first` is better, for pairs of `count` responses.
    """
    wins: list[list[float]] = [[] for _ in range(count)]
    for (first, other), probability in better.items():
        wins[first].append(probability)
        wins[other].append(1 - probability)
    return [sum(own) / len(own) if own else None for own in wins]


def written(judge: Judge, answer: str) -> float:
    """Return the value of a written answer's last number; UnreadableAnswerError if that is no label."""
    numbers = _NUMBER.findall(answer)
    if not numbers or numbers[-1] not in judge.labels:
        problem = f"its last number is {numbers[-1][:20]}" if numbers else "it holds no number"
        raise UnreadableAnswerError(f"the answer is not one of {', '.join(judge.labels)}: {problem}")
    return judge.labels[numbers[-1]]


def first_probabilities(choice: Mapping[str, Any]) -> dict[str, float]:
    """Return label -> probability for the first token of an OpenAI completion, chat or not.

    Raises UnreadableAnswerError if the choice has no log-probabilities, or in an unknown form.
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
        raise UnreadableAnswerError(f"its logprobs have an unknown form ({type(error).__name__}: {error})") from error
    return result
