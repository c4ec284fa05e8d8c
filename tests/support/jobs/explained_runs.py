"""Profiles of iterations, for tests to change, and recorded ones of real runs with an injected cause."""

from pathlib import Path
from typing import Any

from rlhf_planner.explain.iteration_profile import IterationProfile, JobSettings

RUNS = Path(__file__).parent / "recorded_facts"
"""Folder with facts.jsonl of real runs, one file for each injected cause."""


def recorded_facts(**changed: Any) -> IterationProfile:
    """Return an iteration of ten seconds without losses; `changed`: fields of it, or of its settings."""
    settings = {
        "generation_workers": 2,
        "inference_workers": 1,
        "max_batch_size": 8,
        "max_response_tokens": 64,
        "inter_stage": "Auto",
        "balance": "Auto",
        "overlap": "Enabled",
        "speculation": "Auto",
        "intra_stage": "Auto",
        "weight_sharing": "Auto",
        "pipeline": 1,
        "checkpoint_every": 0,
        "evaluation_every": 0,
        "tokens_replayed": False,
    }
    own = {name: changed.pop(name) for name in list(changed) if name in settings}
    whole: dict[str, Any] = {"iteration": 1, "total": 10.0, "phases": {"Generating": 6.0, "Training": 4.0}}
    return IterationProfile(**{**whole, **changed}, settings=JobSettings(**{**settings, **own}))
