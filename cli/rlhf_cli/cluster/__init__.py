"""The verbs of `rlhf` and `kubectl rlhf` against a cluster. `verbs` declares them; `explain` serves `rlhf explain`.

Rule: requests use the user's own rights. A change is a single request.
"""
