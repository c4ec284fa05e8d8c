"""The verbs of `rlhf` and `kubectl rlhf` against a cluster: get, describe, logs, top, suspend, resume, scale, wait.

`verbs` declares them. `explain` serves `rlhf explain`. `cluster_job` and `cluster_pod` read the objects that the API
server returned. `cluster_session` is one command at work.
Rule: everything comes from the API server with the user's own rights. A change is a single request.
"""
