"""A language model that judges responses as a reward: its fields and its default questions."""

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
"""Default question about one response."""
PAIRWISE: Final = (
    "You compare responses to requests.\n\nRequest:\n{prompt}\n\nResponse 1:\n{first}\n\nResponse 2:\n{second}\n\n"
    "Which response is better? Answer with its number alone.\nBetter response:"
)
"""Default question about two responses."""


class JudgeEndpoint(ApiModel):
    """A server with an API like OpenAI's completions."""

    url: Annotated[
        str, Field(pattern=r"^https?://[^/ ]+", max_length=2048, examples=["http://judge:8000/v1/chat/completions"])
    ]
    """Full URL of the request, http or https."""
    api: Literal["Chat", "Completions"] = "Chat"
    """Chat: one user message. Completions: plain text to continue."""
    model: Annotated[str, Field(min_length=1, max_length=256, examples=["judge"])]
    """Name of the model on the server."""
    headers: Annotated[list[RewardHeader], Field(max_length=32)] = Field(default_factory=list)
    """Headers of every request."""


class Judge(ApiModel):
    """A language model that rates a response or picks the better of two: exactly one of endpoint, model."""

    exactly_one: ClassVar = ("endpoint", "model")

    endpoint: JudgeEndpoint | None = None
    """A server inside or outside the cluster."""
    model: ModelSource | None = None
    """A causal language model that workers run with its own tokenizer and chat template."""
    method: Literal["Direct", "Pairwise"] = "Direct"
    """Direct: the judge rates each response; the reward is the expected rating, scaled to -1..1. Pairwise: it compares
    every two responses to a prompt in both orders; the reward is the mean probability (0..1) of being better."""
    template: Annotated[str, Field(min_length=1, max_length=65536)] | None = None
    """Question to the judge. {prompt} is the prompt, {record.answer} the value of its key answer. Direct: {response},
    {minimum}, {maximum}. Pairwise: {first}, {second}; the answer is 1 or 2. Unset: a plain question."""
    minimum: Annotated[int, Field(ge=0, le=9)] = 1
    """Worst rating, one digit: some tokenizers split longer numbers."""
    maximum: Annotated[int, Field(ge=0, le=9)] = 9
    """Best rating."""
    read: Literal["Probabilities", "Answer"] = "Probabilities"
    """Probabilities reads the probability of each rating as the first token. Answer reads the last number in the
    answer's text, for servers without probabilities or judges that think first."""
    answer_tokens: Annotated[int, Field(ge=1, le=65536)] = 512
    """Most tokens in a text answer."""

    @property
    def question(self) -> str:
        """The configured template, or the default one."""
        return self.template or (DIRECT if self.method == "Direct" else PAIRWISE)

    @property
    def labels(self) -> dict[str, float]:
        """Answer -> its value: -1 to 1 for a rating; for two responses, 1 for the first and 0 for the second."""
        if self.method == "Pairwise":
            return {"1": 1.0, "2": 0.0}
        width = self.maximum - self.minimum
        return {str(k): 2 * (k - self.minimum) / width - 1 for k in range(self.minimum, self.maximum + 1)}
