"""`scripts/gpu-check`: small steps that show on one GPU, in nine minutes and without network, what the project claims.

To add a step:

1. Write a module in `steps/` that ends with `STEP = CheckStep(...)`; step.py says what each field is. `run` is given
   - the `CheckedMachine`: which device, what other steps measured (`machine.measured("machine", "bfloat16_tflops")`);
   - the sizes, a frozen dataclass of yours: one value for `--small` (seconds on two CPU cores), one for a GPU;
   - a `Report`, to say what it measured and found: `report.figure("tokens_per_second", 812.5, "tokens/s")`,
     `report.row("decode", batch=1, seconds=0.01)` for a table,
     `report.check("same tokens as transformers", passed, "3 of 4 prompts differ, first at token 17")`, and
     `report.say("building the model")` before anything that takes seconds.
   Each call is on disk at once, so a step that is killed keeps what it measured. A failed check does not end the step.
2. Add its name to `ORDER` in registry.py, by importance: when time runs short, the end of the list is left out.
3. `scripts/gpu-check --steps NAME --small` runs it on CPU; tests/integration/test_gpu_check.py runs all of them so.
4. Say in docs/gpu.md, under the heading of your ground, what to look at first when it fails on a GPU.

A step may import anything at its top: it is loaded in a process of its own, and a failing import is a failed step. It
may start processes: all that it started are killed when it ends or at its limit. It writes files only below
`machine.scratch`. Models are made on the spot by random_models.py; timing.py measures. A step that cannot run on some
machine says so by `raise NotHereError("why, in one line")`.

What runs the steps (`__main__`, `runner`, `results`, `page`, `wheels`) needs the standard library only, since it must
work and report on a machine where nothing else is installed.
"""
