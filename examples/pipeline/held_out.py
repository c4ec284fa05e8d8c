"""Prints one line per stage of the pipeline: what it learned, on prompts drawn with another seed.

Counts the right answers among those that the policies sample, and the held-out pairs that the reward model ranks
correctly. Loads the models with transformers, as any user of the folders would.
"""

from pathlib import Path
from typing import Final

import torch
from make_data import pairs, prompts
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

ASSETS: Final = Path(__file__).parent / "assets"
SEED: Final = 4242
"""Seed that no file of the pipeline has; there are so few prompts that the files contain most of these."""
COUNT: Final = 500
MAX_TOKENS: Final = 12


def folder(stage: str, role: str) -> Path:
    """Return the folder of a role in the newest checkpoint of a stage."""
    return max((ASSETS / stage).glob("iteration-*")) / role


def right_answers(path: Path) -> tuple[float, float]:
    """Return (share of sampled answers whose last number is right, share in the form that SFT teaches)."""
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    right = formed = 0
    for record in prompts(SEED, COUNT):
        ids = tokenizer(record["prompt"], return_tensors="pt")["input_ids"]
        with torch.no_grad():
            tokens = model.generate(
                ids, do_sample=True, top_k=0, max_new_tokens=MAX_TOKENS, pad_token_id=tokenizer.pad_token_id
            )
        said = tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True).replace(" ", "")
        numbers = said.replace("=", "+").split("+")
        formed += int(tokens[0, -1]) == tokenizer.eos_token_id and len(numbers[-1]) == 2 and numbers[-1].isdigit()
        right += numbers[-1] == record["answer"]
    return right / COUNT, formed / COUNT


def ranked_pairs(path: Path) -> float:
    """Return the share of held-out pairs whose right answer has the higher score."""
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForSequenceClassification.from_pretrained(path)
    ranked = 0
    for record in pairs(SEED, COUNT):
        texts = [record["prompt"] + record[key] + tokenizer.eos_token for key in ("chosen", "rejected")]
        with torch.no_grad():
            better, worse = (float(model(**tokenizer(text, return_tensors="pt")).logits) for text in texts)
        ranked += better > worse
    return ranked / COUNT


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    for stage in ("sft", "ppo"):
        right, formed = right_answers(folder(stage, "actor"))
        print(f"{stage}: {formed:.0%} of {COUNT} sampled answers have the form, {right:.0%} are right")
    print(
        f"reward model: {ranked_pairs(folder('reward-model', 'reward')):.0%} of {COUNT} held-out pairs are ranked right"
    )


if __name__ == "__main__":
    main()
