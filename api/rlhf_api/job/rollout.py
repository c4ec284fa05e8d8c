"""`spec.prompts` and `spec.rollout`: the prompts of the policy, and how its responses are sampled."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rlhf_api.api_model import ApiModel, Location
from rlhf_api.job.environment import Environment
from rlhf_common.chats import OF_SYSTEM, Message, messages_of

Name = Annotated[str, Field(min_length=1, max_length=253)]
"""Key of an object, or name of a column."""


class PromptSource(ApiModel):
    """One of several files of prompts."""

    name: Annotated[str, Field(max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
    """Name of the source in metrics and in the log."""
    path: Location
    """Path of the file or folder, see prompts.path."""
    weight: Annotated[int, Field(ge=1, le=1000)] = 1
    """Weight: prompts from this source out of the sum of all weights."""
    prompt_key: Name | None = None
    """Key or column of the prompt in this source; its value moves to prompts.promptKey. Unset: the same key."""


class PromptFiles(ApiModel):
    """Files of prompts."""

    exactly_one: ClassVar = ("path", "sources")

    path: Location | None = None
    """Path of the file or folder, relative to the manifest. Files named .parquet or .arrow are tables, read by column;
    other files are JSONL. A folder is a saved data set of the library datasets, or tables."""
    sources: Annotated[list[PromptSource], Field(min_length=1, max_length=16)] | None = None
    """Several files, mixed by weight, instead of path."""


class Prompts(PromptFiles):
    """Files of prompts: JSONL, parquet or Arrow. Every line or row is an object that the reward receives as `record`.
    If the algorithm generates nothing, it also holds the responses."""

    field: ClassVar = "spec.prompts"
    """Path of the block in the manifest, for errors."""

    prompt_key: Name = "prompt"
    """Key or column of the prompt: a string, or with chatTemplate also a list of chat messages."""
    columns: list[Name] = Field(default_factory=list, max_length=64)
    """Other keys or columns to read, besides prompt and responses. Empty: all."""
    chat_template: bool = False
    """Whether a chat template, by default the tokenizer's, renders the prompt. A string becomes a user message."""
    chat_template_file: Location | None = None
    """Path of a Jinja template, relative to the manifest, instead of the tokenizer's own."""
    chat_template_arguments: dict[str, Any] | None = None
    """Template arguments under its own names, such as enable_thinking; those that it does not use are rejected."""
    system_message: Annotated[str, Field(min_length=1, max_length=65536)] | None = None
    """First message of chats that do not start with role system or developer."""
    shuffle: bool = True
    """Whether to use prompts in a random order, which follows from seed and epoch. False: file order."""
    length_window: Annotated[int, Field(ge=0, le=64)] = 0
    """Iterations whose prompts are sorted together by expected response length, so that a batch has responses of like
    lengths. Earlier epochs teach the lengths; the first one is not sorted. 0 and 1 sort nothing."""
    overlong: Literal["Fail", "Filter"] = "Fail"
    """Handling of lines with a longer prompt or response than spec.rollout allows. Fail fails the job at its start and
    names the line. Filter skips it; the log and metrics count such lines."""

    @property
    def files(self) -> list[PromptSource]:
        """Sources of the prompts, in order; a single file has an empty name."""
        if self.path is not None:
            return [PromptSource.model_construct(name="", path=self.path, weight=1, prompt_key=self.prompt_key)]
        return [
            source.model_copy(update={"prompt_key": source.prompt_key or self.prompt_key})
            for source in self.sources or ()
        ]

    def conversation(self, prompt: object) -> list[Message]:
        """Return the messages of a record's prompt for the chat template. Raises ChatError."""
        messages = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else messages_of(prompt, self.prompt_key)
        )
        if self.system_message is None or (messages and messages[0]["role"] in OF_SYSTEM):
            return messages
        return [{"role": "system", "content": self.system_message}, *messages]


class Rollout(ApiModel):
    """Sampling of responses."""

    batch_size: Annotated[int, Field(ge=1, le=1048576)] = 512
    """Samples (responses) in the batch of an iteration."""
    oversample: Annotated[int, Field(ge=0, le=65536)] = 0
    """Additional prompts per iteration, except for long rounds. The iteration trains on the prompts of one batch, which
    cutBy chooses, and cuts off the others."""
    cut_by: Literal["Clock", "Counts"] = "Clock"
    """Prompts that stay. Clock: those finished first. Counts: those whose longest response is shortest, at any speed of
    workers; a deterministic job needs it."""
    long_rounds: Literal["Disabled", "Enabled", "Auto"] = "Disabled"
    """Enabled decodes cut-off prompts again in separate iterations, with the same random keys. Auto does so if a
    simulation of the job predicts a gain, and chooses the number of surplus prompts."""
    keep_cut: Literal["Nothing", "Drafts"] = "Nothing"
    """Drafts uses the tokens of cut-off prompts as drafts in their long round. The policy verifies them, so no token
    changes."""
    max_staleness: Annotated[int, Field(ge=0, le=64)] = 0
    """Largest age of a token in iterations. The next iteration continues samples that were cut off; a sample with an
    older token restarts. 0 continues none; other values need oversample."""
    overlap_training: Literal["Disabled", "Enabled"] = "Disabled"
    """Enabled decodes an iteration during the previous training, with weights one version old."""
    max_prompt_tokens: Annotated[int, Field(ge=1, le=1048576)] = 256
    """Most tokens in a prompt. For longer ones, see spec.prompts.overlong."""
    max_response_tokens: Annotated[int, Field(ge=1, le=1048576)] = 1024
    """Most tokens in a response, which ends there (finish reason: length). For responses from the prompt file, with
    end-of-sequence token, see spec.prompts.overlong."""
    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    """Sampling temperature; 0 takes the most probable token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the smallest set of tokens with this total probability; 1 keeps all."""
    top_k: Annotated[int, Field(ge=0, le=16777216)] = 0
    """Sample from this many most probable tokens; 0 keeps all."""
    sample_retries: Annotated[int, Field(ge=0, le=10)] = 2
    """Retries of a sample after a worker fails on it, on another worker if possible."""
    max_failed_samples: Annotated[int, Field(ge=0, le=1048575)] = 0
    """Samples per iteration that may fail: the iteration trains without them. One more fails the job, and the
    message names it."""
    stop: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field(default_factory=list, max_length=16)
    """Strings that end a response and stay in its text."""
    stop_token_ids: list[Annotated[int, Field(ge=0, le=16777216)]] = Field(default_factory=list, max_length=64)
    """Token ids that end a response, besides the tokenizer's end-of-sequence token."""
    environment: Environment | None = None
    """Environment for several turns. Unset: a response has one turn."""

    @property
    def takes_up(self) -> bool:
        """Whether iterations may take up samples that earlier ones cut off."""
        return self.max_staleness > 0 or self.long_rounds != "Disabled"

    @property
    def may_be_stale(self) -> bool:
        """Whether training may use tokens sampled with weights of an earlier version."""
        return self.max_staleness > 0 or self.overlap_training == "Enabled"
