"""Models of transformers for workers: loading, masks, experts, adapters, number types, slices of caches."""
