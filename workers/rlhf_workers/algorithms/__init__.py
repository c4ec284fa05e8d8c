"""The algorithms on a training rank, found by their member name in `spec.algorithm`.

`base.Algorithm` is the trainer's interface. Per-token formulas are functions in `rlhf_workers.losses`.
`rlhf_api.algorithms` has the manifest fields. An algorithm outside the project is also a subclass of `base.Algorithm`
(docs/tutorials/your-algorithm.md).
"""
