"""A policy in transformers and in a real vLLM engine of this process, with the right results of decoding."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tests.support.model_folders.models import write_policy
from tests.support.workers.engine_driving import finish, requests
from tests.support.workers.generation_roles import generation_job

from rlhf_common.samples import ResponsePart, SampleRequest
from rlhf_workers.generation.vllm_engine.build import build_engine
from rlhf_workers.generation.vllm_engine.engine import VllmEngine
from rlhf_workers.models.loading import load_tokenizer

CPU = torch.device("cpu")
RESPONSE = 12
Weights = Mapping[str, torch.Tensor]


class Policy:
    """A folder, its model in transformers, and an engine of each kind that decodes it greedily."""

    def __init__(self, folder: Path, architecture: str) -> None:
        self.folder = write_policy(folder, architecture, head_dim=32, eos_token_id=None)
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
        plain = {"mode": "Disabled"}  # one token per step, which tests count; `draft_by` changes that
        job = generation_job(self.folder, deterministic=False, maxBatchSize=8, speculation=plain)
        self.spec = job.spec.model_copy(update={"rollout": job.spec.rollout.model_copy(update={"temperature": 0.0})})
        self.tokenizer = load_tokenizer(str(self.folder), "model")
        self.tokenizer.eos_token = None  # every response has the requested length
        self.engine: VllmEngine = build_engine(self.spec, self.tokenizer, CPU)

    def weights(self) -> Weights:
        """Return the model's current weights, as a training rank publishes them."""
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    def train(self, version: int) -> Weights:
        """Give the model other weights; return them."""
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.15, generator=generator)
        return self.weights()

    def put(self, weights: Weights) -> None:
        """Set the weights of the model, but not of the engine."""
        self.model.load_state_dict(weights, strict=False)

    def update(self, version: int) -> None:
        """Set model and engine to a version."""
        self.engine.load_weights(self.train(version), version)

    def is_right(self, response: ResponsePart, request: SampleRequest) -> bool:
        """Return whether each token is the one that transformers decodes greedily after the previous ones."""
        whole = torch.tensor(np.concatenate([request.prompt, response.tokens]), dtype=torch.int64)
        with torch.no_grad():
            logits = self.model(whole[None]).logits[0, len(request.prompt) - 1 : -1]
        return bool(logits.argmax(-1).tolist() == response.tokens.tolist())

    def decodes_right(self, count: int = 3) -> bool:
        """Return whether the engine decodes some samples as transformers does."""
        asked = {request.key.sample: request for request in requests(count, response=RESPONSE)}
        done = finish(self.engine, list(asked.values()))
        return all(self.is_right(done[sample], request) for sample, request in asked.items())
