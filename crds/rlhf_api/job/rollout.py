"""`spec.prompts` and `spec.rollout`: the prompts of the policy, and how its responses are sampled."""

from typing import Annotated

from pydantic import Field

from rlhf_api.api_model import ApiModel, Location


class Prompts(ApiModel):
    """A JSONL file of prompts. Every line is an object, which the reward receives as `record`."""

    path: Location
    """Path of the file, relative to the manifest."""
    prompt_key: Annotated[str, Field(min_length=1, max_length=253)] = "prompt"
    """Key of the prompt in each object: a string, or a list of chat messages when chatTemplate is true."""
    chat_template: bool = False
    """Whether the prompt is rendered by the tokenizer's chat template."""
    shuffle: bool = True
    """Whether prompts are used in random order, which depends on the seed and the epoch alone. False: in file order."""


class Rollout(ApiModel):
    """Sampling of responses."""

    batch_size: Annotated[int, Field(ge=1, le=1048576)] = 512
    """Samples (responses) per iteration."""
    max_prompt_tokens: Annotated[int, Field(ge=1, le=1048576)] = 256
    """Largest number of tokens of a prompt. A longer one ends the job at its start with an error that names the
    line."""
    max_response_tokens: Annotated[int, Field(ge=1, le=1048576)] = 1024
    """Largest number of tokens of a response, which ends there (finish reason: length)."""
    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    """Temperature of sampling; 0 takes the most probable token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the smallest set of tokens whose probabilities sum to this; 1 keeps all."""
    top_k: Annotated[int, Field(ge=0, le=16777216)] = 0
    """Sample from this many most probable tokens; 0 keeps all."""
    stop: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field(default_factory=list, max_length=16)
    """Strings that end a response. They stay in the text."""
    stop_token_ids: list[Annotated[int, Field(ge=0, le=16777216)]] = Field(default_factory=list, max_length=64)
    """Ids of tokens that end a response, in addition to the tokenizer's end-of-sequence token."""
