"""Limits of drafts on vLLM, and their outcomes: the pure parts of drafting."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from rlhf_api.job.groups import Speculation
from rlhf_workers.failures import WorkError
from rlhf_workers.generation.vllm_engine.draft_budget import DecodingSample, draft_budget, padded_widths
from rlhf_workers.generation.vllm_engine.drafting import judged
from rlhf_workers.generation.vllm_engine.vllm_speculation import speculation_arguments

SAMPLES = st.lists(st.tuples(st.integers(1, 200), st.integers(0, 16)), max_size=12)


@given(SAMPLES, st.integers(-5, 100), st.integers(0, 12), st.sampled_from([16, 32]))
def test_a_draft_takes_what_nobody_else_needs(
    sizes: list[tuple[int, int]], step_tokens: int, free_blocks: int, block_tokens: int
) -> None:
    samples = [DecodingSample(str(number), *size) for number, size in enumerate(sizes)]
    room = draft_budget(samples, step_tokens, free_blocks, block_tokens)
    assert list(room) == [sample.name for sample in samples]
    assert all(0 <= room[sample.name] <= sample.longest for sample in samples)
    assert sum(room.values()) <= max(0, step_tokens)

    def blocks(tokens: int) -> int:
        return -(-tokens // block_tokens)

    own = sum(blocks(sample.tokens) - blocks(sample.tokens - 1) for sample in samples)
    for_drafts = sum(blocks(sample.tokens + room[sample.name]) - blocks(sample.tokens) for sample in samples)
    assert for_drafts <= max(0, free_blocks - own)


def test_a_step_is_shared_and_a_full_cache_lets_drafts_reach_the_end_of_a_block() -> None:
    samples = [DecodingSample("near its end", 30, 8), DecodingSample("far from it", 40, 8)]
    assert draft_budget(samples, 100, 10, 32) == {"near its end": 8, "far from it": 8}
    assert draft_budget(samples, 100, 0, 32) == {"near its end": 2, "far from it": 8}
    assert draft_budget(samples, 6, 10, 32) == {"near its end": 3, "far from it": 3}
    assert draft_budget([DecodingSample("takes the last block itself", 33, 40)], 100, 1, 32) == {
        "takes the last block itself": 31
    }


def test_what_lies_beyond_a_response_was_not_judged() -> None:
    assert judged([5, 6, 7], [5, 6, 7, 8]) == (3, 3)
    assert judged([5, 6, 7], [5, 9]) == (3, 1)
    assert judged([5, 6, 7], [9]) == (3, 0)
    assert judged([5, 6, 7], [5, 6]) == (2, 2), "the response ended with an accepted token"
    assert judged([5, 6, 7], [5, 6, 9]) == (3, 2), "or with the one in place of a wrong one"


def test_a_pass_is_as_wide_as_the_next_captured_one() -> None:
    assert padded_widths(6, ()).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert padded_widths(6, (4, 1, 2)).tolist() == [0, 1, 2, 4, 4, 5, 6]


def test_heads_of_the_policys_own_draft_on_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file({"fc.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    config = {"method": "eagle3", "model": str(tmp_path)}
    assert speculation_arguments(config, "cuda", Speculation(max_tokens=5)) == {**config, "num_speculative_tokens": 5}
    assert speculation_arguments({"method": "mtp", "num_speculative_tokens": 1}, "cuda", Speculation()) == {
        "method": "mtp",
        "num_speculative_tokens": 1,
    }


@pytest.mark.parametrize(
    ("config", "device", "mode", "words"),
    [
        ({"method": "mtp"}, "cpu", "Auto", "speculative_config: .*for GPUs.*speculation.drafters"),
        ({"method": "mtp"}, "cuda", "Disabled", "contradicts spec.generation.speculation.mode: Disabled"),
        ("mtp", "cuda", "Auto", "'mtp' must be a mapping such as"),
        ({"method": "custom_class", "model": "os.path"}, "cuda", "Auto", "method: 'custom_class' must be one of eagle"),
        (
            {"method": "mtp", "rejection_sample_method": "block"},
            "cuda",
            "Auto",
            "rejection_sample_method: 'block' cannot",
        ),
        ({"method": "mtp", "num_speculative_tokens": 40}, "cuda", "Auto", "tokens: 40 must be a number from 1 to 16"),
        ({"method": "eagle", "model": "org/heads"}, "cuda", "Auto", "speculative_config.model"),
    ],
)
def test_a_drafter_of_vllm_that_cannot_be_is_refused_with_its_field(
    config: Any, device: str, mode: Any, words: str
) -> None:
    with pytest.raises(WorkError, match=words) as raised:
        speculation_arguments(config, device, Speculation(mode=mode))
    assert raised.value.failure.field.startswith("spec.generation.engineArgs.speculative_config")
