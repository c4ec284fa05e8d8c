"""Pure functions about requests and job sizes that engines share."""

from rlhf_common.model_files.model_limits import CONTEXT_FIELD, context_problem
from rlhf_common.names import ExitCode
from rlhf_common.samples import FinishReason, ResponsePart, SampleKey, SampleRequest
from rlhf_workers.failures import WorkError
from rlhf_workers.generation.engine import EngineError, EngineLimits


def sample_name(key: SampleKey) -> str:
    """Return the name of a sample in messages."""
    return f"sample {key.sample} of iteration {key.iteration}"


def check_request(request: SampleRequest, limits: EngineLimits, vocabulary: int) -> None:
    """Raise EngineError for lengths beyond the limits, foreign tokens, or fields that do not match the known tokens.

    `vocabulary` is the width of the logits.
    """
    name, prompt, known_tokens = sample_name(request.key), len(request.prompt), len(request.tokens)
    if not 1 <= prompt <= limits.max_prompt_tokens:
        raise EngineError(
            "PromptLength",
            f"{name}: the prompt has {prompt} tokens, must have 1 to {limits.max_prompt_tokens}",
            "spec.rollout.maxPromptTokens",
        )
    if not max(known_tokens, 1) <= request.max_response_tokens <= limits.max_response_tokens:
        raise EngineError(
            "ResponseLength",
            f"{name}: asked for {request.max_response_tokens} response tokens in total with {known_tokens} known, "
            f"must be {max(known_tokens, 1)} to {limits.max_response_tokens}",
            "spec.rollout.maxResponseTokens",
        )
    for part, ids in (("prompt", request.prompt), ("response", request.tokens)):
        wrong = ids[(ids < 0) | (ids >= vocabulary)]
        if wrong.size:
            message = f"{name}: {part} token {wrong[0]} is outside the vocabulary of {vocabulary}"
            raise EngineError("TokenOutsideVocabulary", message)
    if len(request.log_probabilities) != known_tokens or sum(span.tokens for span in request.versions) != known_tokens:
        message = f"{name}: log-probabilities and weight versions do not match its {known_tokens} known tokens"
        raise EngineError("TokensInconsistent", message)


def require_context(max_positions: int | None, limits: EngineLimits) -> None:
    """Raise WorkError when the longest sequence exceeds the model's `max_positions` (None: no limit)."""
    problem = context_problem(limits.max_prompt_tokens, limits.max_response_tokens, max_positions)
    if problem is not None:
        raise WorkError("ContextTooShort", problem, field=CONTEXT_FIELD, exit_code=ExitCode.USAGE)


def known_response(request: SampleRequest, reason: FinishReason) -> ResponsePart:
    """Return the response that a request came with; `reason` is empty while it is unfinished."""
    return ResponsePart(request.key, 0, request.tokens, request.log_probabilities, request.versions, reason)
