"""The algorithms at work on a training rank: one module for each, found by the name of its member in `spec.algorithm`.

A module holds all that makes its algorithm: advantages, weights of tokens, losses, state that checkpoints keep, and
metrics. `base.Algorithm` is what the trainer asks; `objectives` computes losses of policies and value models from
per-token formulas, which are pure functions in `rlhf_workers.losses`. The manifest's side is `rlhf_api.algorithms`.
An algorithm outside the project is a subclass of `base.Algorithm` too (docs/tutorials/your-algorithm.md).
"""
