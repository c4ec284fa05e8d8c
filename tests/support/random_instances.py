"""Random instances for property tests, and a brute-force solver for the smallest of them."""

from hypothesis import strategies as st

from rlhf_planner.schedule.instance import Instance, InstancePipeline


@st.composite
def instances(draw: st.DrawFn, most_devices: int = 16, most_steps: int = 160, whole: bool = False) -> Instance:
    """Draw 2 to 16 devices, 2 to 4 pipelines in either direction on device blocks, unequal times, caps, transfers."""
    devices = draw(st.integers(2, most_devices))
    count = draw(st.integers(2, 4))
    number = st.integers(1, 9).map(float) if whole else st.floats(0.5, 9.0).map(lambda x: round(x, 3))
    small = st.integers(0, 4).map(float) if whole else st.floats(0, 4.0).map(lambda x: round(x, 3))
    pipelines = []
    for index in range(count):
        first = draw(st.integers(0, devices - 1))
        last = draw(st.integers(first, devices - 1))
        on = tuple(range(first, last + 1))
        stages = len(on)
        forward = tuple(draw(st.lists(number, min_size=stages, max_size=stages)))
        backward = tuple(draw(st.lists(number, min_size=stages, max_size=stages)))
        splits = draw(st.booleans())
        pipelines.append(
            InstancePipeline(
                name=f"model{index}",
                stage_devices=on if draw(st.booleans()) else on[::-1],
                microbatches=draw(st.integers(1, max(1, most_steps // (2 * stages * count)))),
                forward=forward,
                backward=backward,
                weight_gradient=tuple(b / 2 if splits else 0.0 for b in backward),
                activation=tuple(draw(st.lists(number, min_size=stages, max_size=stages))),
                transfer=tuple(draw(st.lists(small, min_size=stages - 1, max_size=stages - 1))),
            )
        )
    least = max(max(p.activation) for p in pipelines)
    cap = draw(st.none() | st.floats(1.0, 4.0).map(lambda times: round(times * least + 0.01, 2)))
    return Instance(devices, tuple(pipelines), cap)


MAX_WAYS = 2000
"""States kept after each number of steps; some instances have thousands, which take long to try."""


def shortest(instance: Instance) -> float | None:
    """Return the least makespan under the cap by trying every order; None if that would take too long.

    The backward is not split. For up to about 16 steps. A state is the number of steps that every (stage, kind) has
    run. A way to reach a state is dropped if another one is at least as early everywhere.
    """
    stages = [(p, s) for p, pipe in enumerate(instance.pipelines) for s in range(len(pipe.stage_devices))]
    best = sum((f + b) * p.microbatches for p in instance.pipelines for f, b in zip(p.forward, p.backward, strict=True))
    best += sum(2 * p.microbatches * sum(p.transfer) for p in instance.pipelines)
    open_: dict[tuple[int, ...], list[tuple[float, ...]]] = {(0,) * (2 * len(stages)): [()]}
    total = sum(2 * instance.pipelines[p].microbatches for p, _ in stages)
    for _ in range(total):
        reached: dict[tuple[int, ...], dict[tuple[float, ...], tuple[float, ...]]] = {}
        for counts, pasts in open_.items():
            for past in pasts:
                ends = dict(zip(_done(instance, stages, counts), past, strict=True))
                for after, finish in _next(instance, stages, counts, ends):
                    if max(finish.values()) > best + 1e-9:
                        continue
                    key = tuple(finish[k] for k in _done(instance, stages, after))
                    reached.setdefault(after, {})[key] = key
        if sum(map(len, reached.values())) > MAX_WAYS:
            return None
        open_ = {counts: _undominated(list(ways)) for counts, ways in reached.items()}
    return min(max(past) for pasts in open_.values() for past in pasts)


Key = tuple[int, str, int]  # index of the stage in `stages`, kind, micro-batch


def _done(instance: Instance, stages: list[tuple[int, int]], counts: tuple[int, ...]) -> list[Key]:
    return [(i, kind, m) for i in range(len(stages)) for j, kind in enumerate("FB") for m in range(counts[2 * i + j])]


def _undominated(ways: list[tuple[float, ...]]) -> list[tuple[float, ...]]:
    ways.sort()
    minimal: list[tuple[float, ...]] = []
    for way in ways:
        if not any(all(a <= b for a, b in zip(other, way, strict=True)) for other in minimal):
            minimal.append(way)
    return minimal


def _next(
    instance: Instance, stages: list[tuple[int, int]], counts: tuple[int, ...], ends: dict[Key, float]
) -> list[tuple[tuple[int, ...], dict[Key, float]]]:
    """Return every step that may run next, each on its device after the earlier steps there: (counts, end times) after
    it.
    """
    result = []
    for i, (p, s) in enumerate(stages):
        pipe = instance.pipelines[p]
        device = pipe.stage_devices[s]
        on_device = [j for j, (q, t) in enumerate(stages) if instance.pipelines[q].stage_devices[t] == device]
        idle = max((ends[k] for k in ends if k[0] in on_device), default=0.0)
        holds = sum(
            (counts[2 * j] - counts[2 * j + 1]) * instance.pipelines[stages[j][0]].activation[stages[j][1]]
            for j in on_device
        )
        for j, kind in enumerate("FB"):
            m = counts[2 * i + j]
            if m >= pipe.microbatches or (kind == "B" and counts[2 * i] <= m):
                continue
            if (
                kind == "F"
                and instance.memory_cap is not None
                and holds + pipe.activation[s] > instance.memory_cap + 1e-9
            ):
                continue
            other = s - 1 if kind == "F" else s + 1
            ready = ends[(i, "F", m)] if kind == "B" else 0.0
            if 0 <= other < len(pipe.stage_devices):
                before = (i + other - s, kind, m)
                if before not in ends:
                    continue
                lag = pipe.transfer[min(s, other)] if pipe.stage_devices[other] != device else 0.0
                ready = max(ready, ends[before] + lag)
            length = pipe.forward[s] if kind == "F" else pipe.backward[s]
            after = tuple(c + (n == 2 * i + j) for n, c in enumerate(counts))
            result.append((after, {**ends, (i, kind, m): max(ready, idle) + length}))
    return result
