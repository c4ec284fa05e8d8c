"""TRL's side of benchmarks/peers.py, in a separate environment: one whole training with GRPOTrainer.

Rule: one JSON argument is the configuration. The last line of standard output is one object: when each iteration
ended, its mean reward and its response tokens. Imports nothing of this project, which that environment lacks, and
downloads nothing.
"""

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TRACKIO_DISABLE": "1"}

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

Score = Callable[[str, str, dict[str, Any]], float]


def score_of(file: str) -> Score:
    """Return the function `score` of a Python file."""
    found = importlib.util.spec_from_file_location("reward", file)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    score: Score = module.score
    return score


class IterationRecorder(TrainerCallback):  # type: ignore[misc]  # transformers is not read by the type checker
    """Records times, rewards and tokens of iterations."""

    def __init__(self, score: Score, steps: int) -> None:
        """Prepare for `steps` optimizer steps per iteration."""
        self._score, self._steps = score, steps
        self.ends_ns: list[int] = []
        self.rewards: list[float] = []
        self.tokens: list[int] = []

    def rewarded(
        self, prompts: list[str], completions: list[str], completion_ids: list[list[int]], **columns: Any
    ) -> list[float]:
        """Return the reward of each response of a batch, in GRPOTrainer's interface: columns are lists."""
        records = [
            {key: values[row] for key, values in columns.items() if isinstance(values, list)}
            for row in range(len(prompts))
        ]
        rewards = [self._score(*asked) for asked in zip(prompts, completions, records, strict=True)]
        self.rewards.append(sum(rewards) / len(rewards))
        self.tokens.append(sum(map(len, completion_ids)))
        return rewards

    def on_step_end(self, _arguments: Any, state: Any, *_: Any, **__: Any) -> None:
        """Record the end of an iteration, at its last optimizer step."""
        if state.global_step % self._steps == 0:
            self.ends_ns.append(time.time_ns())


def main() -> None:
    """Train, and print the records."""
    wanted = json.loads(sys.argv[1])
    torch.set_num_threads(wanted["threads"])
    trl, datasets = import_module("trl"), import_module("datasets")
    tokenizer = AutoTokenizer.from_pretrained(wanted["policy"], padding_side="left")
    steps = wanted["batch"] // wanted["mini_batch"]
    recorder = IterationRecorder(score_of(wanted["reward"]), steps)
    lines = Path(wanted["prompts"]).read_text().splitlines()
    config = trl.GRPOConfig(
        output_dir=wanted["folder"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        per_device_train_batch_size=wanted["micro_batch"],
        gradient_accumulation_steps=wanted["mini_batch"] // wanted["micro_batch"],
        generation_batch_size=wanted["batch"],
        num_generations=wanted["group"],
        max_completion_length=wanted["response"],
        beta=wanted["kl"],
        epsilon=wanted["clip"],
        loss_type="grpo",
        learning_rate=wanted["learning_rate"],
        lr_scheduler_type="linear",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=steps * wanted["iterations"],
        use_transformers_continuous_batching=wanted["continuous"],
        save_strategy="no",
        logging_steps=10 * steps,
        report_to="none",
        disable_tqdm=True,
        seed=wanted["seed"],
    )
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(wanted["policy"], dtype=torch.float32),
        reward_funcs=recorder.rewarded,
        args=config,
        train_dataset=datasets.Dataset.from_list([json.loads(line) for line in lines]),
        processing_class=tokenizer,
        callbacks=[recorder],
    )
    trainer.train()
    recorded = ("ends_ns", "rewards", "tokens")
    print(json.dumps({name: getattr(recorder, name) for name in recorded}))


if __name__ == "__main__":
    main()
