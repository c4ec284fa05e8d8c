"""The training ranks of one pod as processes: their common endpoint, their environments, and their ends.

Rule: modules of this package do not start processes; `rank_launcher` does.
"""
