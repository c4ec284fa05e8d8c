"""A language model that judges responses, as a reward: its fields, and what it is asked by default."""

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from rlhf_api.api_model import ApiModel
from rlhf_api.job.model_source import ModelSource
from rlhf_api.job.reward_headers import RewardHeader

DIRECT: Final = (
    "You judge responses to requests.\n\nRequest:\n{prompt}\n\nResponse:\n{response}\n\n"
    "How good is the response, from {minimum}, the worst, to {maximum}, the best? Answer with the number alone.\n"
    "Rating:"
)
"""Asked of one response."""
PAIRWISE: Final = (
    "You compare responses to requests.\n\nRequest:\n{prompt}\n\nResponse 1:\n{first}\n\nResponse 2:\n{second}\n\n"
    "Which response is better? Answer with its number alone.\nBetter response:"
)
"""Asked of two responses."""


class JudgeEndpoint(ApiModel):
    """A server that speaks the format of OpenAI's completions."""

    url: Annotated[
        str, Field(pattern=r"^https?://[^/ ]+", max_length=2048, examples=["http://judge:8000/v1/chat/completions"])
    ]
    """Whole URL of the request, http or https."""
    api: Literal["Chat", "Completions"] = "Chat"
    """Chat: one message of the user. Completions: plain text that is continued."""
    model: Annotated[str, Field(min_length=1, max_length=256, examples=["judge"])]
    """Name of the model, as the server knows it."""
    headers: Annotated[list[RewardHeader], Field(max_length=32)] = Field(default_factory=list)
    """Headers of every request."""


class Judge(ApiModel):
    """A language model that is asked how good a response is, or which of two is better: exactly one of endpoint,
    model."""

    exactly_one: ClassVar = ("endpoint", "model")

    endpoint: JudgeEndpoint | None = None
    """A server, beside the job or far away."""
    model: ModelSource | None = None
    """A causal language model run in inference workers, with its own tokenizer and chat template."""
    method: Literal["Direct", "Pairwise"] = "Direct"
    """Direct: each response is rated, and the reward is the expected rating, scaled to -1..1. Pairwise: every two
    responses to a prompt are compared in both orders, and the reward is the mean probability, 0..1, to be better."""
    template: Annotated[str, Field(min_length=1, max_length=65536)] | None = None
    """What is asked. {prompt} stands for the prompt, {record.answer} for the value of its key answer; Direct:
    {response}, {minimum}, {maximum}; Pairwise: {first}, {second}, of which the answer is 1 or 2. Unset: a plain
    question."""
    minimum: Annotated[int, Field(ge=0, le=9)] = 1
    """Worst rating, one digit: tokenizers split longer numbers."""
    maximum: Annotated[int, Field(ge=0, le=9)] = 9
    """Best rating."""
    read: Literal["Probabilities", "Answer"] = "Probabilities"
    """Probabilities: of the answer's first token, weighed over all ratings. Answer: the last number of a written
    answer, of a server that gives no probabilities or a judge that thinks first."""
    answer_tokens: Annotated[int, Field(ge=1, le=65536)] = 512
    """Tokens of a written answer at most."""

    @property
    def question(self) -> str:
        """The template, or the one that stands for it."""
        return self.template or (DIRECT if self.method == "Direct" else PAIRWISE)

    @property
    def labels(self) -> dict[str, float]:
        """Answer -> what it is worth: ratings from -1 to 1; of two responses, 1 for the first and 0 for the second."""
        if self.method == "Pairwise":
            return {"1": 1.0, "2": 0.0}
        width = self.maximum - self.minimum
        return {str(k): 2 * (k - self.minimum) / width - 1 for k in range(self.minimum, self.maximum + 1)}
