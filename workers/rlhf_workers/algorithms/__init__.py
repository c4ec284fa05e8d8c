"""The algorithms on a training rank, one module per algorithm, found by its member name in `spec.algorithm`.

A module defines its algorithm: advantages, token weights, losses, checkpointed state, and metrics. `base.Algorithm` is
the trainer's interface. `objectives` computes losses of policies and value models from per-token formulas, whose parts
are functions in `rlhf_workers.losses`. `rlhf_api.algorithms` has the manifest fields. An algorithm outside the project
is also a subclass of `base.Algorithm` (docs/tutorials/your-algorithm.md).
"""
