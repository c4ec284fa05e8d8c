"""Training backends, one module for each: what a rank of the training group computes with. `registry` finds them."""
