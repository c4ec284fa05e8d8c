"""The interface of the process: gRPC for workers, operator and command line; Prometheus; status; logs.

Rule: a request from outside (stop, resize) becomes a part of the state; the scheduler decides what follows from it.
"""
