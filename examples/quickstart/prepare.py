"""Makes what the quickstart trains: a small policy and critic (real Hugging Face folders) and a JSONL prompt file.

The task is adding two or three digits aloud: `3+5+2=` is to be answered `08+2=10`. The policy is warmed up by
supervised steps on demonstrations of which, in the last steps, eight in ten end in a random number. So it knows
how to answer and is often wrong, which is where reinforcement learning starts. Never fetches anything; the same seed
gives the same files.
"""

import argparse
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHARACTERS = "0123456789+="
IGNORED = -100
"""Label of positions without a loss, as torch's cross entropy has it."""
CLEAN_STEPS = 500
"""Steps on right demonstrations: enough for more than 90% of greedy answers to be right."""
NOISY_STEPS = 80
"""steps on mostly wrong demonstrations: enough to spread the policy's probability over wrong answers."""
NOISE = 0.8
BATCH = 128
PEAK_LEARNING_RATE = 4e-3
WARM_UP_STEPS = 30
FORMAT = 3
"""Rises with every change of what this script makes, so that stale files are made again."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, and an end-of-sequence and a padding token."""
    vocabulary = {token: index for index, token in enumerate([*CHARACTERS, "<eos>", "<pad>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def demonstration(rng: random.Random, *, noise: float) -> tuple[str, str, str]:
    """(prompt, response, right answer); with probability `noise` the response ends in a random number."""
    digits = [rng.randrange(10) for _ in range(rng.choice((2, 2, 3)))]
    total, said = digits[0], ""
    for position, digit in enumerate(digits[1:], start=1):
        total += digit
        last = position == len(digits) - 1
        shown = rng.randrange(10 * len(digits)) if last and rng.random() < noise else total
        said += f"{shown:02d}" + ("" if last else f"+{digits[position + 1]}=")
    return "+".join(map(str, digits)) + "=", said, f"{total:02d}"


def batch(tokenizer: PreTrainedTokenizerFast, rng: random.Random, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, both int64 [BATCH, longest]; only response tokens have a label."""
    shown = [demonstration(rng, noise=noise) for _ in range(BATCH)]
    asked = tokenizer([prompt for prompt, _, _ in shown])["input_ids"]
    answered = tokenizer([response + tokenizer.eos_token for _, response, _ in shown])["input_ids"]
    rows = [torch.tensor([*prompt, *response]) for prompt, response in zip(asked, answered, strict=True)]
    labels = [torch.tensor([IGNORED] * len(p) + r) for p, r in zip(asked, answered, strict=True)]
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, True, tokenizer.pad_token_id), pad(labels, True, IGNORED)


def warm_up(tokenizer: PreTrainedTokenizerFast, seed: int, advance: Callable[[float], None]) -> LlamaForCausalLM:
    """A policy of 188 thousand parameters after CLEAN_STEPS + NOISY_STEPS supervised steps."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    policy = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=96, intermediate_size=192, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=False,
            bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(policy.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(CLEAN_STEPS + NOISY_STEPS):
        noisy = step >= CLEAN_STEPS
        decay = 0.2 if noisy else 1 - 0.8 * step / CLEAN_STEPS
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LEARNING_RATE * decay * min(1.0, (step + 1) / WARM_UP_STEPS)
        tokens, labels = batch(tokenizer, rng, NOISE if noisy else 0.0)
        logits = policy(input_ids=tokens).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        advance(loss.item())
    return policy


def prompts(seed: int, count: int) -> list[dict[str, str]]:
    """Prompt records with the right answer, which only the reward function reads."""
    rng = random.Random(f"prompts-{seed}")
    asked = (demonstration(rng, noise=0.0) for _ in range(count))
    return [{"prompt": prompt, "answer": answer} for prompt, _, answer in asked]


def prepare(folder: Path, seed: int) -> None:
    """Fills `folder` with policy/, critic/ and prompts.jsonl; a stopped run leaves nothing under that name."""
    scratch = folder.with_name(folder.name + ".partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    tokenizer = build_tokenizer()
    columns = (TextColumn("warming up the policy"), BarColumn(), TextColumn("loss {task.fields[loss]:.2f}"))
    with Progress(*columns, TimeRemainingColumn()) as progress:
        task = progress.add_task("", total=CLEAN_STEPS + NOISY_STEPS, loss=0.0)
        policy = warm_up(tokenizer, seed, lambda loss: progress.update(task, advance=1, loss=loss))
    for name in ("policy", "critic"):
        policy.save_pretrained(scratch / name)
        tokenizer.save_pretrained(scratch / name)
    lines = (json.dumps(record) + "\n" for record in prompts(seed, count=2048))
    (scratch / "prompts.jsonl").write_text("".join(lines))
    (scratch / "made.json").write_text(json.dumps({"format": FORMAT, "seed": seed}))
    shutil.rmtree(folder, ignore_errors=True)
    scratch.rename(folder)


def main() -> None:
    """Command line; does nothing when the files are there already."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "assets")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    made = arguments.folder / "made.json"
    if made.is_file() and json.loads(made.read_text()) == {"format": FORMAT, "seed": arguments.seed}:
        print(f"{arguments.folder}: already there")
        return
    torch.set_num_threads(1)  # more threads only wait for each other in a model this small
    prepare(arguments.folder, arguments.seed)
    print(f"{arguments.folder}: policy/, critic/, prompts.jsonl")


if __name__ == "__main__":
    main()
