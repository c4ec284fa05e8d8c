"""Models made on the spot: Llama-like ones of a stated size with random weights, as Hugging Face folders on disk.

Rule: the product loads them by its own code, so folder, config and tensors are the real thing; only the weights mean
nothing. The same shape and seed give the same weights on CPU, whatever the device; `fast` gives that up to make a
billion parameters on a GPU in a second.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

logging.disable_progress_bar()  # a bar for every file would fill the log
CHARACTERS = "0123456789+="
"""Those of the quickstart: one token each, so its prompts and reward work with every model here."""


@dataclass(frozen=True)
class LlamaShape:
    """Shape of a Llama."""

    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    intermediate: int
    vocabulary: int
    positions: int = 4096
    tied: bool = True


TINY = LlamaShape(hidden=64, layers=2, heads=4, key_value_heads=2, intermediate=128, vocabulary=64, positions=512)
"""0.1 million parameters: a CPU decodes it in milliseconds a token."""
HALF_BILLION = LlamaShape(
    hidden=896, layers=24, heads=14, key_value_heads=2, intermediate=4864, vocabulary=151_936, positions=32_768
)
"""494 million parameters: the shape of Qwen2.5-0.5B."""
ONE_BILLION = LlamaShape(
    hidden=2048, layers=16, heads=32, key_value_heads=8, intermediate=8192, vocabulary=128_256, positions=32_768
)
"""1.24 billion parameters: the shape of Llama 3.2 1B."""
THREE_BILLION = LlamaShape(
    hidden=3072, layers=28, heads=24, key_value_heads=8, intermediate=8192, vocabulary=128_256, positions=32_768
)
"""3.2 billion parameters: the shape of Llama 3.2 3B."""


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character of the quickstart's prompts, an end of sequence and a padding token."""
    vocabulary = {token: index for index, token in enumerate([*CHARACTERS, "<eos>", "<pad>"])}
    made = Tokenizer(tokenizer_models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>")


def config_of(shape: LlamaShape) -> LlamaConfig:
    """Return the config of a shape."""
    words = tokenizer()
    return LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=shape.positions,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )


def write_model(
    folder: Path, shape: LlamaShape, dtype: torch.dtype, *, seed: int = 0, device: str = "cpu", fast: bool = False
) -> int:
    """Writes config, safetensors and tokenizer; the number of parameters. `fast`: the weights are drawn on `device`."""
    torch.manual_seed(seed)
    with torch.device(device if fast else "cpu"):
        model: Any = LlamaForCausalLM._from_config(config_of(shape), dtype=dtype)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    count: int = sum(parameter.numel() for parameter in model.parameters())
    del model
    if fast and device != "cpu":
        torch.cuda.empty_cache()
    return count


def write_prompts(path: Path, count: int, seed: int = 0) -> None:
    """Writes a JSONL of additions, as the quickstart has them: `{"prompt": "3+5=", "answer": "08"}`."""
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.randint(0, 10, (count, 2), generator=generator).tolist()
    lines = (json.dumps({"prompt": f"{a}+{b}=", "answer": f"{a + b:02d}"}) + "\n" for a, b in pairs)
    path.write_text("".join(lines))


def main() -> None:
    """`python -m gpu_check.random_models FOLDER` writes the tiny one, for a look at what steps are given."""
    sys.stdout.write(f"{write_model(Path(sys.argv[1]), TINY, torch.float32)} parameters\n")


if __name__ == "__main__":
    main()
