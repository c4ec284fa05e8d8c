"""Generated models: Llama-like ones of a given size with random weights, as Hugging Face folders on disk.

Owns their sizes and prompts. The product loads them with its own code, so folder, config and tensors are real; only the
weights are meaningless. It must never write outside its folder.
"""

import json
from pathlib import Path
from typing import Any

import torch
from tests.support.model_folders.models import build_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()  # a bar for every file would fill the log


def llama(
    hidden: int, layers: int, heads: int, key_value_heads: int, intermediate: int, vocabulary: int, positions: int
) -> LlamaConfig:
    """Return the config of a Llama; end and padding tokens are in the shared tokenizer."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )


TINY = llama(64, 2, 4, 2, 128, vocabulary=64, positions=512)
"""0.1 million parameters: a CPU decodes it in milliseconds per token."""
HALF_BILLION = llama(896, 24, 14, 2, 4864, vocabulary=151_936, positions=32_768)
"""494 million parameters: the shape of Qwen2.5-0.5B."""
FEW_WORDS = llama(896, 24, 14, 2, 4864, vocabulary=64, positions=32_768)
"""358 million parameters: the same, with responses that end by themselves at different lengths."""
ONE_BILLION = llama(2048, 16, 32, 8, 8192, vocabulary=128_256, positions=32_768)
"""1.24 billion parameters: the shape of Llama 3.2 1B."""


def random_model(config: LlamaConfig, dtype: torch.dtype, device: torch.device | str) -> Any:
    """Return a model whose weights are drawn on the device."""
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM._from_config(config, dtype=dtype)


def write_model(folder: Path, config: LlamaConfig, dtype: torch.dtype, device: torch.device | str) -> int:
    """Write config, safetensors and tokenizer; return the number of parameters."""
    model = random_model(config, dtype, device)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    count: int = sum(parameter.numel() for parameter in model.parameters())
    del model
    torch.cuda.empty_cache()
    return count


def write_prompts(path: Path, count: int) -> None:
    """Write a JSONL of additions, as in the quickstart: `{"prompt": "3+5=", "answer": "08"}`."""
    pairs = torch.randint(0, 10, (count, 2), generator=torch.Generator().manual_seed(0)).tolist()
    lines = (json.dumps({"prompt": f"{a}+{b}=", "answer": f"{a + b:02d}"}) + "\n" for a, b in pairs)
    path.write_text("".join(lines))
