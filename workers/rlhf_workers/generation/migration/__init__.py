"""Samples on their way from worker to worker with their KV caches.

In the order of a move: `outgoing` is the source, between engine steps; `kv_transfer` is its call to the destination;
`kv_sink` is the service that takes the call there; `incoming` is the destination, between its engine steps. `kv_chunks`
cuts caches into chunks and puts them together. What a cache looks like is the engine's (`torch_engine.kv_moves`).
"""
