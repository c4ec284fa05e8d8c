"""The algorithms on a training rank, found by their member name in `spec.algorithm`.

`base.Algorithm` is the trainer's interface, also for plug-ins (docs/tutorials/your-algorithm.md).
"""
