"""The verbs of `rlhf` and `kubectl rlhf` against a cluster: get, describe, logs, top, suspend, resume, scale, wait.

One module per verb (`get`, `describe`, `logs`, `top`, `wait`; `spec_change` for suspend, resume and scale), declared in
`verbs`. `cluster_job` and `cluster_pod` read what the API server returned; `cluster_session` is one command at work.
Rule: everything comes from the API server with the user's own rights; the operator and the coordinator are never
dialled. What is shown is computed by pure functions from the objects that were read. When this process dies, no job is
affected: a change is a single request.
"""
