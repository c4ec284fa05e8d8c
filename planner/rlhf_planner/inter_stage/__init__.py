"""The long tail of generation: its cost, when to consolidate it on few workers, and where each sample goes.

`costs` predicts the time of steps, `lengths` response lengths, and `simulate` the time of an iteration with a
threshold and a pool. `choose` selects the best threshold and pool. `tail_placement` assigns samples to workers at the
threshold, `balance` moves samples before it, and `incremental_gain` decides whether to score prefixes.
Rule: pure; no clock, no input or output, no global state. Randomness comes in as a seed or a generator.
Source: RLHFuse (arXiv 2409.13221), inter-stage fusion.
"""
