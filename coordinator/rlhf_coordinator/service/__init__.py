"""The edge of the process: gRPC for workers, operator and command line; Prometheus; status; logs.

Owns the wire, and what the outside is told of the job.
Rule: translate, and keep nothing but open streams and the batches that ranks fetch. An order from outside (stop,
resize) becomes a part of the state. Must never decide what follows from it: the scheduler does.
"""
