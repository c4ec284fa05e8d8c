"""Bounds of histograms, by measured quantity.

Rule: at most fourteen bounds, because each adds a series per set of labels. A change breaks comparisons with the past.
"""

from typing import Final

RECONCILE_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Work of the operator: from a millisecond to a request that times out."""
POD_SECONDS: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Waits for pods: images, nodes, loading of models."""
STEP_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
"""A mini-batch, a load of weights or a checkpoint: from test models to hundreds of billions of parameters."""
SAMPLE_SECONDS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
"""Phases of one sample: waiting, decoding, scoring."""
MOVE_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Transfer of a KV cache between two workers."""
ITERATION_SECONDS: Final = (0.5, 1.0, 2.5, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0, 7200.0)
"""Whole iterations."""
TOKENS: Final = (8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0)
"""Lengths of responses."""
