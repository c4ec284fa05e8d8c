"""Models of transformers as workers use them: loading, masks, experts, adapters, number types, slices of caches.

Rule: no module here imports a role, or one that moves weights.
"""
