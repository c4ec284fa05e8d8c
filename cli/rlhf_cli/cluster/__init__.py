"""The verbs of `rlhf` and `kubectl rlhf` against a cluster: get, describe, logs, top, suspend, resume, scale, wait.

Rule: everything comes from the API server with the user's own rights; the operator and the coordinator are never
dialled. What is shown is made by pure functions from the objects that were read. When this process dies, nothing of a
job is affected: each change is one request.
"""
