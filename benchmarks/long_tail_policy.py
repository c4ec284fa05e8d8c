"""A policy whose end-of-sequence decisions create a long tail, and scoring models of any size.

The policy is a real Llama folder. Attention and MLP are computed in full, but their output projections are zero. So the
logits depend only on the last token and are the log-probabilities of a Markov chain. It leads from the prompt's last
token to a short or a long path, on each of which the probability to end is constant.
"""

import math
from pathlib import Path
from typing import Any

import torch
import transformers
from tests.support.model_folders import models

PROMPT = "go="
SHORT_PROMPT, LONG_PROMPT = "go-", "go+"
"""Prompts whose responses are short, and long with the probability LONG_PROMPT_SHARE."""
LONG_PROMPT_SHARE = 0.8
SHORT, LONG = "abcdefghij", "0123456789"
"""Tokens of the two paths; a path is left only by the end of the response."""
LONG_SHARE = 1 / 15
"""Share of responses that take the long path."""
SHORT_TOKENS, LONG_TOKENS = 28.0, 560.0
"""Mean lengths of the two paths in tokens."""
NEVER = -40.0
"""Logit of a token that must not follow."""
HIDDEN = 64
"""Hidden size, at least the vocabulary: every token has its own direction."""


def transitions(token_ids: dict[str, int], eos: int, size: int) -> torch.Tensor:
    """Return the [next, last] log-probabilities."""
    table = torch.full((size, size), NEVER)
    for path, mean in ((SHORT, SHORT_TOKENS), (LONG, LONG_TOKENS)):
        follows = [token_ids[character] for character in path]
        for last in follows:
            table[eos, last] = math.log(1 / mean)
            table[follows, last] = math.log((1 - 1 / mean) / len(follows))
    for prompt, share in ((PROMPT, LONG_SHARE), (SHORT_PROMPT, 0.0), (LONG_PROMPT, LONG_PROMPT_SHARE)):
        start = token_ids[prompt[-1]]
        table[[token_ids[c] for c in SHORT], start] = math.log((1 - share) / len(SHORT))
        if share:
            table[[token_ids[c] for c in LONG], start] = math.log(share / len(LONG))
    return table


def unequal_prompts(count: int) -> list[str]:
    """Return prompts that determine most of the lengths, with LONG_SHARE of the responses long."""
    every = round(LONG_PROMPT_SHARE / LONG_SHARE)
    return [LONG_PROMPT if place % every == 0 else SHORT_PROMPT for place in range(count)]


def write_policy(folder: Path, layers: int) -> Path:
    """Write the policy with its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = models.build_tokenizer()
    config = models.build_config(
        hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=layers, max_position_embeddings=2048
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
        size = model.config.vocab_size
        model.model.embed_tokens.weight.copy_(torch.eye(size, HIDDEN))
        ids = {character: tokenizer.convert_tokens_to_ids(character) for character in models.CHARACTERS}
        # A normalized basis direction has length sqrt(HIDDEN).
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, :size] = transitions(ids, tokenizer.eos_token_id, size) / math.sqrt(HIDDEN)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_scorer(folder: Path, **sizes: Any) -> Path:
    """Write a model of these sizes with the policy's vocabulary."""
    hidden = int(sizes["hidden_size"])
    return models.write_policy(
        folder, "llama", intermediate_size=4 * hidden, head_dim=hidden // 4, max_position_embeddings=2048, **sizes
    )
