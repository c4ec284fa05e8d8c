"""Creates the inputs of the quickstart: a small policy and critic (real Hugging Face folders) and a JSONL prompt file.

The task is to add two or three digits aloud. The right response to `3+5+2=` is `08+2=10`. Supervised steps on
demonstrations warm up the policy; in the last steps eight in ten demonstrations end in a random number. So the policy
knows how to answer but is often wrong, which is where reinforcement learning starts. Never downloads anything. The
same seed gives the same files.
"""

import argparse
import json
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHARACTERS = "0123456789+="
IGNORED = -100
"""Label of positions without a loss, as in torch's cross entropy."""
CLEAN_STEPS = 500
"""Number of steps on right demonstrations."""
NOISY_STEPS = 80
"""Number of steps on mostly wrong demonstrations, which spread the policy's probability over wrong answers."""
NOISE = 0.8
HIDDEN = 96
HEAD = 32
"""Size of an attention head."""
POSITIONS = 64
BATCH = 128
PEAK_LEARNING_RATE = 4e-3
WARM_UP_STEPS = 30
FORMAT = 4
"""Version of this script's output. Increase it with every change, so that stale files are created again."""


def build_tokenizer(characters: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character, an end-of-sequence and a padding token."""
    vocabulary = {token: index for index, token in enumerate([*characters, "<eos>", "<pad>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def demonstration(rng: random.Random, *, noise: float) -> tuple[str, str, str]:
    """Return (prompt, response, right answer); with probability `noise` the response ends in a random number."""
    digits = [rng.randrange(10) for _ in range(rng.choice((2, 2, 3)))]
    total, said = digits[0], ""
    for position, digit in enumerate(digits[1:], start=1):
        total += digit
        last = position == len(digits) - 1
        shown = rng.randrange(10 * len(digits)) if last and rng.random() < noise else total
        said += f"{shown:02d}" + ("" if last else f"+{digits[position + 1]}=")
    return "+".join(map(str, digits)) + "=", said, f"{total:02d}"


def batch(tokenizer: PreTrainedTokenizerFast, shown: Sequence[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and labels of (prompt, answer), both int64 [n, longest]; only tokens of answers have a label."""
    asked = tokenizer([prompt for prompt, _ in shown])["input_ids"]
    answered = tokenizer([answer for _, answer in shown])["input_ids"]
    rows = [torch.tensor([*prompt, *response]) for prompt, response in zip(asked, answered, strict=True)]
    labels = [torch.tensor([IGNORED] * len(p) + r) for p, r in zip(asked, answered, strict=True)]
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, True, tokenizer.pad_token_id), pad(labels, True, IGNORED)


def build_policy(tokenizer: PreTrainedTokenizerFast, positions: int, hidden: int, layers: int) -> LlamaForCausalLM:
    """Return a new policy, with heads of size 32."""
    heads = hidden // HEAD
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=positions,
            tie_word_embeddings=False, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip


def teach(
    policy: LlamaForCausalLM,
    lessons: Iterable[tuple[torch.Tensor, torch.Tensor, float]],
    advance: Callable[[float], None],
) -> None:
    """Take a supervised step on each of (token ids, labels, learning rate); call `advance` with its loss."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    for tokens, labels, rate in lessons:
        for group in optimizer.param_groups:
            group["lr"] = rate
        logits = policy(input_ids=tokens).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        advance(loss.item())


def warm_up(tokenizer: PreTrainedTokenizerFast, seed: int, advance: Callable[[float], None]) -> LlamaForCausalLM:
    """Return a policy of 187 thousand parameters after CLEAN_STEPS + NOISY_STEPS supervised steps."""
    torch.manual_seed(seed)
    rng = random.Random(seed)

    def lessons() -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
        for step in range(CLEAN_STEPS + NOISY_STEPS):
            noisy = step >= CLEAN_STEPS
            decay = 0.2 if noisy else 1 - 0.8 * step / CLEAN_STEPS
            shown = [demonstration(rng, noise=NOISE if noisy else 0.0) for _ in range(BATCH)]
            pairs = [(prompt, response + tokenizer.eos_token) for prompt, response, _ in shown]
            yield *batch(tokenizer, pairs), PEAK_LEARNING_RATE * decay * min(1.0, (step + 1) / WARM_UP_STEPS)

    policy = build_policy(tokenizer, POSITIONS, HIDDEN, layers=2)
    teach(policy, lessons(), advance)
    return policy


def prompts(seed: int, count: int) -> list[dict[str, str]]:
    """Return prompt records with the right answer, which the reward function reads."""
    rng = random.Random(f"prompts-{seed}")
    asked = (demonstration(rng, noise=0.0) for _ in range(count))
    return [{"prompt": prompt, "answer": answer} for prompt, _, answer in asked]


def write(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    models: Mapping[str, LlamaForCausalLM],
    records: Sequence[Mapping[str, str]],
    creation: Mapping[str, int],
) -> None:
    """Replace `folder` by the models' folders, prompts.jsonl and made.json, once all are written."""
    scratch = folder.with_name(folder.name + ".partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    for name, model in models.items():
        model.save_pretrained(scratch / name)
        tokenizer.save_pretrained(scratch / name)
    (scratch / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (scratch / "made.json").write_text(json.dumps(creation))
    shutil.rmtree(folder, ignore_errors=True)
    scratch.rename(folder)


def prepare(folder: Path, seed: int, creation: Mapping[str, int]) -> None:
    """Create policy/, critic/ and prompts.jsonl in `folder`."""
    tokenizer = build_tokenizer()
    with shown_progress("warming up the policy", CLEAN_STEPS + NOISY_STEPS) as advance:
        policy = warm_up(tokenizer, seed, advance)
    write(folder, tokenizer, {"policy": policy, "critic": policy}, prompts(seed, count=2048), creation)


@contextmanager
def shown_progress(label: str, steps: int) -> Iterator[Callable[[float], None]]:
    """Show a progress bar; yield the function that advances it with a step's loss."""
    columns = (TextColumn(label), BarColumn(), TextColumn("loss {task.fields[loss]:.2f}"))
    with Progress(*columns, TimeRemainingColumn()) as progress:
        task = progress.add_task("", total=steps, loss=0.0)
        yield lambda loss: progress.update(task, advance=1, loss=loss)


def made_by_command(
    script: str, description: str | None, form: int, make: Callable[[Path, int, Mapping[str, int]], None]
) -> None:
    """Run the command line of a script that creates a folder of assets next to it; do nothing if they exist."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(script).parent / "assets")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    file, creation = arguments.folder / "made.json", {"format": form, "seed": arguments.seed}
    if file.is_file() and json.loads(file.read_text()) == creation:
        print(f"{arguments.folder}: already there")
        return
    torch.set_num_threads(1)  # in a model this small more threads only wait for each other
    make(arguments.folder, arguments.seed, creation)
    print(f"{arguments.folder}: {', '.join(sorted(path.name for path in arguments.folder.iterdir()))}")


if __name__ == "__main__":
    made_by_command(__file__, __doc__, FORMAT, prepare)
