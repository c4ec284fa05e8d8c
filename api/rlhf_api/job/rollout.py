"""`spec.prompts` and `spec.rollout`: the prompts of the policy, and how its responses are sampled."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rlhf_api.api_model import ApiModel, Location
from rlhf_api.job.environment import Environment
from rlhf_common.chats import OF_SYSTEM, Message, messages_of

Name = Annotated[str, Field(min_length=1, max_length=253)]
"""Of a key of objects, or a column."""


class PromptSource(ApiModel):
    """One of several files of prompts."""

    name: Annotated[str, Field(max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
    """Name of the source in metrics and in the log."""
    path: Location
    """Path of the file or folder, as prompts.path."""
    weight: Annotated[int, Field(ge=1, le=1000)] = 1
    """Prompts of this source among as many as the weights of all sources sum to."""
    prompt_key: Name | None = None
    """Key or column of the prompt in this source, which objects then have under prompts.promptKey. Unset: that."""


class PromptFiles(ApiModel):
    """Which files prompts are read from."""

    exactly_one: ClassVar = ("path", "sources")

    path: Location | None = None
    """Path of the file or folder, relative to the manifest. Names in .parquet or .arrow are tables, read by their
    columns; any other file is JSONL. A folder is a saved data set of the library datasets, or tables."""
    sources: Annotated[list[PromptSource], Field(min_length=1, max_length=16)] | None = None
    """Several files that are mixed by their weights, in place of path."""


class Prompts(PromptFiles):
    """Files of prompts: JSONL, parquet or Arrow. Every line or row is an object, which the reward receives as `record`;
    for algorithms that generate nothing it holds the responses, too."""

    field: ClassVar = "spec.prompts"
    """Path of the block in the manifest, which errors name."""

    prompt_key: Name = "prompt"
    """Key or column of the prompt: a string, or with chatTemplate a list of chat messages, too."""
    columns: list[Name] = Field(default_factory=list, max_length=64)
    """Keys or columns that objects have beside those of prompt and responses; others are not read. None: all."""
    chat_template: bool = False
    """Whether the prompt is rendered by the tokenizer's chat template. A string is then a message of the user."""
    chat_template_file: Location | None = None
    """Path of a Jinja template, relative to the manifest, in place of the tokenizer's own."""
    chat_template_arguments: dict[str, Any] | None = None
    """Arguments of the template under its own names, such as enable_thinking; one that it does not read is refused."""
    system_message: Annotated[str, Field(min_length=1, max_length=65536)] | None = None
    """First message of chats that begin with none of role system."""
    shuffle: bool = True
    """Whether prompts are used in random order, which depends on the seed and the epoch alone. False: in file order."""
    overlong: Literal["Fail", "Filter"] = "Fail"
    """What becomes of a line whose prompt or response has more tokens than spec.rollout allows. Fail ends the job at
    its start and names it. Filter leaves it out; the log and the metrics of every iteration count such lines."""

    @property
    def files(self) -> list[PromptSource]:
        """What the prompts are read from, in order; a single file has an empty name."""
        if self.path is not None:
            return [PromptSource.model_construct(name="", path=self.path, weight=1, prompt_key=self.prompt_key)]
        return [
            source.model_copy(update={"prompt_key": source.prompt_key or self.prompt_key})
            for source in self.sources or ()
        ]

    def conversation(self, prompt: object) -> list[Message]:
        """Return the messages of a record's prompt that a chat template renders. Raises ChatError."""
        messages = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else messages_of(prompt, self.prompt_key)
        )
        if self.system_message is None or (messages and messages[0]["role"] in OF_SYSTEM):
            return messages
        return [{"role": "system", "content": self.system_message}, *messages]


class Rollout(ApiModel):
    """Sampling of responses."""

    batch_size: Annotated[int, Field(ge=1, le=1048576)] = 512
    """Samples (responses) per iteration."""
    oversample: Annotated[int, Field(ge=0, le=65536)] = 0
    """Prompts of an iteration beyond those of its batch. Once responses to as many prompts as the batch has are
    finished, the others are cut off and not trained on. Which these are depends on how
    fast workers are. 0 in a deterministic job."""
    max_staleness: Annotated[int, Field(ge=0, le=64)] = 0
    """Iterations over which a sample that is cut off is carried with its tokens: the next one begins with its prompt
    and goes on where it stands. One with a token that is older by more versions is begun anew. 0 carries nothing; needs
    oversample."""
    overlap_training: Literal["Disabled", "Enabled"] = "Disabled"
    """Enabled decodes an iteration while the one before trains, by weights one version older."""
    max_prompt_tokens: Annotated[int, Field(ge=1, le=1048576)] = 256
    """Most tokens of a prompt; spec.prompts.overlong says what becomes of a longer one."""
    max_response_tokens: Annotated[int, Field(ge=1, le=1048576)] = 1024
    """Most tokens of a response, which ends there (finish reason: length); of one that the prompt file
    holds, with its end-of-sequence token, see spec.prompts.overlong."""
    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    """Temperature of sampling; 0 takes the most probable token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the smallest set of tokens whose probabilities sum to this; 1 keeps all."""
    top_k: Annotated[int, Field(ge=0, le=16777216)] = 0
    """Sample from this many most probable tokens; 0 keeps all."""
    sample_retries: Annotated[int, Field(ge=0, le=10)] = 2
    """Times that a sample is decoded again, on another worker if there is one, after one failed on it."""
    max_failed_samples: Annotated[int, Field(ge=0, le=1048575)] = 0
    """Samples of an iteration that may fail: it goes on, and trains, without them. One more fails the job and is
    named."""
    stop: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field(default_factory=list, max_length=16)
    """Strings that end a response. They stay in the text."""
    stop_token_ids: list[Annotated[int, Field(ge=0, le=16777216)]] = Field(default_factory=list, max_length=64)
    """Ids of tokens that end a response, beside the tokenizer's end-of-sequence token."""
    environment: Environment | None = None
    """What answers the turns of the policy. Unset: a response is one turn."""

    @property
    def may_be_stale(self) -> bool:
        """Whether tokens may be trained on that weights of an earlier version drew."""
        return self.max_staleness > 0 or self.overlap_training == "Enabled"
