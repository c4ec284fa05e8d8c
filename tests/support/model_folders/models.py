"""Tiny, randomly initialised Hugging Face folders for tests: real configurations, real safetensors, a real tokenizer.

Rule: the same arguments give the same bytes. The weights are spread wider than in a fresh initialisation, so that
greedy decoding varies instead of repeating one token. Windows are smaller than the sequences the tests decode.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

ARCHITECTURES: Final = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "mixtral", "qwen3_moe")
WINDOW: Final = 8
"""Tokens a sliding-window layer sees (mistral: every layer, gemma2: every other one)."""
CHARACTERS: Final = "0123456789abcdefghijklmnopqrstuvwxyz+-*=.,:?! \n"
SPECIAL: Final = ("<pad>", "<eos>", "<unk>")
VOCABULARY: Final = len(SPECIAL) + len(CHARACTERS)
SPREAD: Final = 0.15
"""Standard deviation of the initial weights."""

_SMALL: Final[Mapping[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": SPREAD,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
_EXTRA: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": WINDOW, "tie_word_embeddings": False},
    "gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 8, "final_logit_softcapping": 30.0},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False},
    "qwen3_moe": {
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
    },
}


def build_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character of CHARACTERS, after <pad> 0, <eos> 1 and <unk> 2. The round trip
    from text to ids and back is exact.
    """
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def build_config(architecture: str = "llama", **changes: Any) -> transformers.PreTrainedConfig:
    """Return the configuration of a tiny model of `architecture`; `changes` replace its fields."""
    return transformers.AutoConfig.for_model(architecture, **{**_SMALL, **_EXTRA[architecture], **changes})


def write_policy(folder: Path, architecture: str = "llama", *, seed: int = 0, **changes: Any) -> Path:
    """Write a causal language model with its tokenizer into `folder`; return it."""
    return _write(folder, transformers.AutoModelForCausalLM, build_config(architecture, **changes), seed)


def write_reward_model(folder: Path, architecture: str = "llama", *, seed: int = 0, **changes: Any) -> Path:
    """Write a sequence classification model, with one output unless `changes` differ, into `folder`; return it."""
    config = build_config(architecture, **{"num_labels": 1, **changes})
    return _write(folder, transformers.AutoModelForSequenceClassification, config, seed)


def _write(folder: Path, kind: Any, config: transformers.PreTrainedConfig, seed: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    key = (kind, config.to_json_string(use_diff=False), seed)
    if key not in _written:
        with tempfile.TemporaryDirectory() as place:
            _save(Path(place), kind, config, seed)
            _written[key] = {path.name: path.read_bytes() for path in Path(place).iterdir()}
    for name, data in _written[key].items():
        (folder / name).write_bytes(data)
    return folder


_written: dict[tuple[Any, str, int], dict[str, bytes]] = {}
"""(class, configuration, seed) -> file name -> bytes, of the folders that this process has written before."""


def _save(folder: Path, kind: Any, config: transformers.PreTrainedConfig, seed: int) -> None:
    """Make a model and save it with its tokenizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                torch.nn.init.normal_(parameter, mean=0.0 if "bias" in name else 1.0, std=0.1)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
