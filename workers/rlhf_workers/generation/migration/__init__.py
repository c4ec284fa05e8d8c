"""Moves samples with their KV caches from worker to worker.

In the order of a move: `outgoing` is the source, `kv_transfer` its call to the destination, `kv_sink` the service that
takes the call, and `incoming` the destination. `kv_chunks` cuts caches into chunks and joins them.
"""
