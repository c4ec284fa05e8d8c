"""The training ranks of one pod as processes: their common endpoint, their environments, and their ends.

`rank_launcher` starts them. Rule: modules of this package do not import each other, and do not start processes.
"""
