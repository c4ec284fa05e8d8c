"""`spec.evaluation`: tests of the policy while the job runs, on their own prompts or on those of the job."""

from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field

from rlhf_api.api_model import ApiModel, Location
from rlhf_api.job.rollout import Name, PromptFiles, Prompts

INHERITED: Final = (
    *("prompt_key", "columns", "overlong"),
    *("chat_template", "chat_template_file", "chat_template_arguments", "system_message"),
)
"""Fields that evaluation prompts may inherit from the job's prompts where they are unset."""
OF_TEMPLATE: Final = ("chat_template_file", "chat_template_arguments", "system_message")
"""Inherited fields that need a chat template."""


class EvaluationPrompts(PromptFiles):
    """Prompts for evaluations only. Fields of `INHERITED` have no defaults: unset ones may take values of spec.prompts
    (`inherit`)."""

    prompt_key: Name | None = None
    """See prompts.promptKey."""
    columns: Annotated[list[Name], Field(max_length=64)] | None = None
    """See prompts.columns."""
    chat_template: bool | None = None
    """See prompts.chatTemplate."""
    chat_template_file: Location | None = None
    """See prompts.chatTemplateFile."""
    chat_template_arguments: dict[str, Any] | None = None
    """See prompts.chatTemplateArguments."""
    system_message: Annotated[str, Field(max_length=65536)] | None = None
    """See prompts.systemMessage; empty: none."""
    shuffle: bool = True
    """Ignored: evaluations use file order."""
    overlong: Literal["Fail", "Filter"] | None = None
    """See prompts.overlong."""

    def inherit(self, job: Prompts) -> Self:
        """Return a copy that takes the unset fields of `INHERITED` from the job's prompts. The call is idempotent.

        If `chat_template` is False, it takes no fields of a template.
        """
        without_template = OF_TEMPLATE if self.chat_template is False else ()
        missing = [name for name in INHERITED if getattr(self, name) is None and name not in without_template]
        return self.model_copy(update={name: getattr(job, name) for name in missing})


class HeldOutPrompts(Prompts):
    """The prompts of an evaluation, with inherited fields filled in."""

    field: ClassVar = "spec.evaluation.prompts"


class Evaluation(ApiModel):
    """Evaluation during training. Generation workers decode responses of a weight version; the job's reward scores
    them. They are not trained on."""

    every: Annotated[int, Field(ge=1, le=1000000)] = 10
    """Iterations between evaluations. Version 0, every n-th version and the last one are due."""
    prompts: EvaluationPrompts | None = None
    """Prompts for evaluation; some unset fields take the values of spec.prompts. Unset: the prompts of the job in file
    order."""
    prompt_count: Annotated[int, Field(ge=1, le=65536)] = 64
    """Prompts to evaluate, from the start of the file or of several sources; all prompts if there are fewer."""
    samples_per_prompt: Annotated[int, Field(ge=1, le=256)] = 1
    """Responses per prompt (k). Above 1, pass@k and the best of k are reported too."""
    temperature: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Sampling temperature; 0 takes the most probable token. spec.rollout sets the other sampling parameters."""
    pass_reward: Annotated[float, Field(ge=-1000000, le=1000000)] = 1.0
    """Lowest reward with which a response passes."""

    def held_out(self, job: Prompts) -> HeldOutPrompts | None:
        """Return the evaluation's own prompts with inherited fields; None if it uses the job's prompts."""
        if self.prompts is None:
            return None
        fields = dict(self.prompts.inherit(job))
        return HeldOutPrompts(**{name: value for name, value in fields.items() if value not in (None, "")})

    def due(self, version: int, iterations: int) -> bool:
        """Return whether to evaluate a weight version in a job of `iterations` iterations."""
        return version % self.every == 0 or version == iterations
