"""The training ranks of one pod as processes: the address they meet at, their environments, and how they end.

`rank_launcher` starts them. Rule: no module here imports another one of this package, and none starts a process.
"""
