"""The interface of the process: gRPC for workers, operator and command line; Prometheus; status; logs.

It owns the network interface, and the job's public state.
Rule: translate, and store no state of the job besides cached batches. A request from outside (stop, resize) becomes a
part of the state; the scheduler decides what follows from it.
"""
