"""The long tail of generation: its cost, when to consolidate it on few workers, and where each sample goes.

Rule: pure. Source: RLHFuse (arXiv 2409.13221), inter-stage fusion.
"""
