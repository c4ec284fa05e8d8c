"""The edge of the process: gRPC for workers, operator and command line; Prometheus; status; logs.

Owns the wire, and what is said about the job to the outside.
Rule: translate, and keep nothing but open streams. An order from outside (stop, resize) becomes a part of the state.
Must never decide what follows from it, nor answer for a worker: that is `loop`.
"""
