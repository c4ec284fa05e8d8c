"""`spec.prompts` and `spec.rollout`: what is asked of the policy, and how it answers."""

from typing import Annotated

from pydantic import Field

from rlhf_api.api_model import ApiModel, Location


class Prompts(ApiModel):
    """A JSONL file; every line is an object, handed to the reward as `record`."""

    path: Location
    """File path, relative to the manifest."""
    prompt_key: Annotated[str, Field(min_length=1, max_length=253)] = "prompt"
    """Key of the prompt: a string, or a list of chat messages when chatTemplate is true."""
    chat_template: bool = False
    """Render the prompt through the tokenizer's chat template."""
    shuffle: bool = True
    """Visit prompts in a random order that depends on seed and pass alone."""


class Rollout(ApiModel):
    """Sampling of responses."""

    batch_size: Annotated[int, Field(ge=1, le=1048576)] = 512
    """Samples (responses) an iteration."""
    max_prompt_tokens: Annotated[int, Field(ge=1, le=1048576)] = 256
    """Longer prompts are an error at start-up, naming the line."""
    max_response_tokens: Annotated[int, Field(ge=1, le=1048576)] = 1024
    """A response is cut at this many tokens (finish reason: length)."""
    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keep the smallest set of tokens with this much probability."""
    top_k: Annotated[int, Field(ge=0, le=16777216)] = 0
    """Keep this many most probable tokens; 0 keeps all."""
    stop: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field(default_factory=list, max_length=16)
    """Strings that end a response; kept in the text."""
    stop_token_ids: list[Annotated[int, Field(ge=0, le=16777216)]] = Field(default_factory=list, max_length=64)
    """Token ids that end a response, beside the tokenizer's end-of-sequence token."""
