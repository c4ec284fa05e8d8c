"""Draws the tokens of vLLM's model runner with the project's rule, `generation/sampling.py`.

Rule: rows of the logits belong to the requests of the runner's input batch in its order, one row for each position
decided. Must never read vLLM's own random generators.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from rlhf_common.samples import Drawing
from rlhf_workers.generation.engine import SamplingParameters
from rlhf_workers.generation.sampling import sample
from rlhf_workers.generation.vllm_engine.uniform_table import KeyedRequest, UniformTable

SAMPLE_KEY: Final = "rlhf_random_key"
"""Name of the argument with the sample's random key, as decimal text because it has 64 bits."""
PROMPT_TOKENS: Final = "rlhf_prompt_tokens"
"""Length of the sample's prompt; later tokens of a request's prompt are response."""

DRAWING: Final = "rlhf_drawing"
"""Name of the argument that says how its tokens are drawn, as a number of `Drawing`."""


class KeyedSampler:
    """Replaces the model runner's `sampler`."""

    def __init__(self, runner: Any, parameters: SamplingParameters) -> None:
        """Raise TypeError for another kind of runner, which would draw by itself."""
        if not isinstance(runner, GPUModelRunner):
            raise TypeError(f"vLLM's model runner {type(runner).__qualname__} is not the one whose sampler is replaced")
        self.logprobs_mode = runner.sampler.logprobs_mode
        """Mode that vLLM's dummy runs read."""
        self._runner = runner
        self._parameters = parameters
        self._most_rows = int(runner.max_num_reqs)
        """Maximum rows drawn at once."""
        self._uniforms_ahead = UniformTable()

    def __call__(self, logits: torch.Tensor, sampling_metadata: object) -> Any:
        """Draw one token for each row of logits [n, vocabulary]; vLLM's `sampling_metadata` is not used."""
        tokens, log_probabilities = self.draw(logits, (1,) * len(logits))
        drawn = tokens.to(torch.int32)[:, None]
        figures = LogprobsTensors(drawn, log_probabilities[:, None], torch.zeros_like(drawn[:, 0]))
        return SamplerOutput(sampled_token_ids=drawn, logprobs_tensors=figures)

    def draw(self, logits: torch.Tensor, counts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens [n] int64 and log-probabilities [n] float32 for logits [n, vocabulary].

        `counts`, with sum n: positions of each request that are decided here, from its next one on.
        """
        uniform = torch.from_numpy(self._uniforms(counts)).to(logits.device, non_blocking=True)
        drawn = [
            sample(logits[start : start + self._most_rows], uniform[start : start + self._most_rows], self._parameters)
            for start in range(0, len(logits), self._most_rows)
        ]
        if len(drawn) == 1:
            return drawn[0]
        return torch.cat([tokens for tokens, _ in drawn]), torch.cat([figures for _, figures in drawn])

    def _uniforms(self, counts: Sequence[int]) -> npt.NDArray[np.float64]:
        """Return uniforms [sum of counts] of the positions that requests decide next; zeros for rows of a dummy run, or
        if no token is drawn at random."""
        drawn = np.zeros(sum(counts), np.float64)
        if not self._parameters.random:
            return drawn
        names = self._runner.input_batch.req_ids[: len(counts)]
        decided = np.array(counts[: len(names)], np.int64)
        lengths = self._runner.input_batch.num_tokens_no_spec[: len(names)]
        of_requests = self._uniforms_ahead.rows(names, lengths, decided, self._keyed_request)
        drawn[: len(of_requests)] = of_requests
        self._uniforms_ahead.forget_others(self._runner.requests)
        return drawn

    def _keyed_request(self, name: str) -> KeyedRequest:
        arguments = self._runner.requests[name].sampling_params.extra_args
        drawing = Drawing(arguments[DRAWING])
        return KeyedRequest(int(arguments[SAMPLE_KEY]), int(arguments[PROMPT_TOKENS]), drawing)
