"""The interface of the process: gRPC for workers, operator and command line; Prometheus; status; logs.

A request to stop or to resize becomes a part of the state; the scheduler decides what follows from it.
"""
