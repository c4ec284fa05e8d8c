"""`spec.evaluation`: the policy is tried on prompts that it is not trained on, while the job goes on."""

from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field

from rlhf_api.api_model import ApiModel, Location
from rlhf_api.job.rollout import Name, PromptFiles, Prompts

INHERITED: Final = (
    *("prompt_key", "columns", "overlong"),
    *("chat_template", "chat_template_file", "chat_template_arguments", "system_message"),
)
"""Fields that the prompts of an evaluation have from those of the job, unless they set them."""
OF_TEMPLATE: Final = ("chat_template_file", "chat_template_arguments", "system_message")
"""Of them, those that are read only with a chat template."""


class EvaluationPrompts(PromptFiles):
    """Prompts that only evaluations read. A field that is unset is as in spec.prompts, so it has no default."""

    prompt_key: Name | None = None
    """As prompts.promptKey."""
    columns: Annotated[list[Name], Field(max_length=64)] | None = None
    """As prompts.columns."""
    chat_template: bool | None = None
    """As prompts.chatTemplate."""
    chat_template_file: Location | None = None
    """As prompts.chatTemplateFile."""
    chat_template_arguments: dict[str, Any] | None = None
    """As prompts.chatTemplateArguments."""
    system_message: Annotated[str, Field(max_length=65536)] | None = None
    """As prompts.systemMessage; an empty one is none."""
    shuffle: bool = True
    """Not read: evaluations go by the file's order."""
    overlong: Literal["Fail", "Filter"] | None = None
    """As prompts.overlong."""

    def inherit(self, job: Prompts) -> Self:
        """Return the prompts with the fields of the job's that they do not set. Inheriting again changes nothing."""
        without_template = OF_TEMPLATE if self.chat_template is False else ()
        missing = [name for name in INHERITED if getattr(self, name) is None and name not in without_template]
        return self.model_copy(update={name: getattr(job, name) for name in missing})


class HeldOutPrompts(Prompts):
    """The prompts of an evaluation, with what they inherit."""

    field: ClassVar = "spec.evaluation.prompts"


class Evaluation(ApiModel):
    """Evaluation during training: some responses of a weight version are judged by the job's reward, and never trained
    on. They are decoded by generation workers that have nothing else to do."""

    every: Annotated[int, Field(ge=1, le=1000000)] = 10
    """Iterations between two evaluations: weight version 0, every n-th one, and the last are evaluated."""
    prompts: EvaluationPrompts | None = None
    """Prompts of their own, read as spec.prompts says where a field is unset. Unset: those of the job, in the order of
    its file."""
    prompt_count: Annotated[int, Field(ge=1, le=65536)] = 64
    """Prompts that are evaluated, from the beginning of the file; all of a file that has fewer."""
    samples_per_prompt: Annotated[int, Field(ge=1, le=256)] = 1
    """Responses to each prompt (k). Above 1, pass@k and the best of k are told too."""
    temperature: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Temperature of sampling; 0 takes the most probable token. Other numbers of sampling are those of spec.rollout."""
    pass_reward: Annotated[float, Field(ge=-1000000, le=1000000)] = 1.0
    """A response passes with this reward or more."""

    def held_out(self, job: Prompts) -> HeldOutPrompts | None:
        """Return the prompts of their own, with what they inherit from those of the job; None without any."""
        if self.prompts is None:
            return None
        fields = dict(self.prompts.inherit(job))
        return HeldOutPrompts(**{name: value for name, value in fields.items() if value not in (None, "")})

    def due(self, version: int, iterations: int) -> bool:
        """Return whether a weight version of a job with so many iterations is evaluated."""
        return version % self.every == 0 or version == iterations
