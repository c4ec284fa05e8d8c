"""Models of transformers for workers: loading, masks, experts, adapters, number types, slices of caches.

Rule: no module here imports a role, or a module that moves weights.
"""
