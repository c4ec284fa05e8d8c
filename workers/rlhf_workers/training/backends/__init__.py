"""Training backends: the compute implementation of a training rank, one module per backend. `registry` finds them."""
