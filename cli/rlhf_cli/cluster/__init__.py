"""The verbs of `rlhf` and `kubectl rlhf` against a cluster: get, describe, logs, top, suspend, resume, scale, wait.

`get`, `describe`, `logs`, `top`, `wait` have a module each; suspend, resume and scale share `spec_change`. `verbs`
declares them. `explain` serves `rlhf explain`. `cluster_job` and `cluster_pod` read the objects that the API server
returned. `cluster_session` is one command at work.
Rule: everything comes from the API server with the user's own rights; the operator and the coordinator are never
dialled. Pure functions compute the output from the objects that were read. The death of this process affects no job: a
change is a single request.
"""
