"""Moves samples with their KV caches from worker to worker.

In the order of a move: `outgoing` is the source, between engine steps; `kv_transfer` is its call to the destination;
`kv_sink` is the service that takes the call; `incoming` is the destination, between its engine steps. `kv_chunks` cuts
caches into chunks and joins them. The format of a cache belongs to the engine, as in `torch_engine.kv_moves`.
"""
