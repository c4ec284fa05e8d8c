"""The engine decodes the same as transformers: greedy tokens and log-probabilities, for every attention."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.model_folders.models import ARCHITECTURES
from tests.support.workers.engine_driving import MakeEngine, finish, requests


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_equal_transformers_generate(
    architecture: str, deterministic: bool, make_engine: MakeEngine, load: Callable[[str], tuple[Any, Any]]
) -> None:
    samples = requests(9, response=30)
    done = finish(make_engine(architecture, deterministic=deterministic, slots=5, temperature=0), samples)
    for sample in samples:
        prompt = torch.from_numpy(sample.prompt.astype(np.int64))[None]
        with torch.inference_mode():
            whole = load(architecture)[0].generate(prompt, do_sample=False, max_new_tokens=30, pad_token_id=0)[0]
        assert done[sample.key.sample].tokens.tolist() == whole[len(sample.prompt) :].tolist()


@pytest.mark.full(quick=5)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probabilities_match_a_full_forward_pass(
    architecture: str, temperature: float, make_engine: MakeEngine, load: Callable[[str], tuple[Any, Any]]
) -> None:
    samples = requests(6)
    done = finish(make_engine(architecture, temperature=temperature, top_p=0.9, top_k=20), samples)
    for sample in samples:
        response = done[sample.key.sample]
        whole = torch.from_numpy(np.concatenate([sample.prompt, response.tokens]).astype(np.int64))
        with torch.inference_mode():
            logits = load(architecture)[0](whole[None], use_cache=False).logits[0, len(sample.prompt) - 1 : -1]
        wanted = torch.log_softmax(logits / temperature, -1).gather(1, whole[len(sample.prompt) :, None])[:, 0]
        np.testing.assert_allclose(response.log_probabilities, wanted.numpy(), atol=1e-4, rtol=0)
        assert response.versions == ((0, len(response.tokens)),)


def test_a_gpu_style_engine_with_the_fused_kernel_decodes_the_same_tokens(
    make_engine: MakeEngine, load: Callable[[str], tuple[Any, Any]]
) -> None:
    samples = requests(6, response=20)
    written_out = finish(make_engine(temperature=0), samples)
    model = load("llama")[0]
    model.set_attn_implementation("sdpa")
    try:
        fused = finish(make_engine(temperature=0), samples)
    finally:
        model.set_attn_implementation("eager")
    assert {n: r.tokens.tolist() for n, r in fused.items()} == {n: r.tokens.tolist() for n, r in written_out.items()}


def test_samples_of_one_prompt_share_its_prefill_and_differ(make_engine: MakeEngine) -> None:
    first = requests(1, longest=30)[0]
    group = [
        replace(first, key=first.key._replace(sample=index), random_key=first.random_key + index) for index in range(4)
    ]
    together = finish(make_engine(), group)
    for sample in group:
        alone = finish(make_engine(), [sample])[sample.key.sample]
        assert together[sample.key.sample].tokens.tolist() == alone.tokens.tolist()
    assert len({response.tokens.tobytes() for response in together.values()}) > 1
