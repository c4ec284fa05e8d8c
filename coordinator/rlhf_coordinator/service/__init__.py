"""The interface of the process: gRPC for workers, operator and command line; Prometheus; status; logs."""
