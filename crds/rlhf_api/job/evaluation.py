"""`spec.evaluation`: the policy is tried on prompts that it is not trained on, while the job goes on."""

from typing import Annotated

from pydantic import Field

from rlhf_api.api_model import ApiModel
from rlhf_api.job.rollout import Prompts


class Evaluation(ApiModel):
    """Evaluation during training: some responses of a weight version are judged by the job's reward, and never trained
    on. They are decoded by generation workers that have nothing else to do."""

    every: Annotated[int, Field(ge=1, le=1000000)] = 10
    """Iterations between two evaluations: weight version 0, every n-th one, and the last are evaluated."""
    prompts: Prompts | None = None
    """Prompts of their own. Unset: those of the job, in the order of its file."""
    prompt_count: Annotated[int, Field(ge=1, le=65536)] = 64
    """Prompts that are evaluated, from the beginning of the file; all of a file that has fewer."""
    samples_per_prompt: Annotated[int, Field(ge=1, le=256)] = 1
    """Responses to each prompt (k). Above 1, pass@k and the best of k are told too."""
    temperature: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Temperature of sampling; 0 takes the most probable token. Other numbers of sampling are those of spec.rollout."""
    pass_reward: Annotated[float, Field(ge=-1000000, le=1000000)] = 1.0
    """A response passes with this reward or more."""

    def due(self, version: int, iterations: int) -> bool:
        """Return whether a weight version of a job with so many iterations is evaluated."""
        return version % self.every == 0 or version == iterations
