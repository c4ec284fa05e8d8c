"""The long tail of generation: what it costs, when to consolidate it on few workers, and where each sample goes.

`costs` says what steps take, `lengths` how long responses get, `simulate` what an iteration takes under a threshold
and a pool, and `choose` which of them is best; `tail_placement` says who goes where when the threshold is reached,
`balance` what moves before it, and `incremental_gain` whether to score prefixes.
After RLHFuse (arXiv 2409.13221), inter-stage fusion. All of it is pure: no clock, no input or output, no global state;
randomness comes in as a seed.
"""
