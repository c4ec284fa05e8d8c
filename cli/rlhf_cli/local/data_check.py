"""Check the data of a job with the tokenizer, configuration and prompt files of this machine.

Rule: it reads them with the code of the job's start, and reads no weights. An absent tokenizer is a warning.
"""

from typing import Final

from rlhf_api.job import RLHFJobSpec
from rlhf_api.problems import Problem, Severity
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.model_folders import local_folder
from rlhf_coordinator.storage.job_prompts import PromptReader

ACTOR_FIELD: Final = "spec.models.actor.path"
TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
"""Files of which a tokenizer's folder has at least one."""


def data_problems(spec: RLHFJobSpec) -> list[Problem]:
    """Return errors and warnings of a job that is resolved for this machine and whose files exist."""
    try:
        reader = PromptReader(spec)
        read = [reader.training(), reader.evaluation()]
    except JobError as error:
        failure = error.failure
        if failure.field == ACTOR_FIELD and not _has_tokenizer(spec.models.actor.path):
            message = f"{failure.message}; data were not checked"
            return [Problem(failure.field, None, message, severity=Severity.WARNING)]
        return [Problem(failure.field, None, failure.message)]
    warnings = dict.fromkeys(text for prompts in read for prompt in prompts[:1] for text in prompt.warnings)
    return [Problem("spec.prompts", None, text, severity=Severity.WARNING) for text in warnings]


def _has_tokenizer(source: str) -> bool:
    folder = local_folder(source)
    return folder is not None and any((folder / name).is_file() for name in TOKENIZERS)
