"""The long tail of generation: its cost, when to consolidate it on few workers, and where each sample goes.

Rule: pure. Randomness comes in as a seed or a generator. Source: RLHFuse (arXiv 2409.13221), inter-stage fusion.
"""
