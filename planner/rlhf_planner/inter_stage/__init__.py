"""The long tail of generation: what it will cost, when to consolidate it on few workers, and where each sample goes.

`costs` what steps take, `lengths` how long responses get, `simulate` what an iteration takes under a threshold and a
pool, `choose` the best of them, `place` who goes where when the threshold is reached, `balance` moves before it.
After RLHFuse (arXiv 2409.13221), inter-stage fusion. All of it is pure: no clock, no input or output, no global state;
randomness comes in as a seed.
"""
