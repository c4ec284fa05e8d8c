"""Every iteration is trained with its own total number of iterations, also when it is trained again."""

from rlhf_coordinator.state.iteration_totals import IterationTotals, read_iteration_totals


def test_a_change_holds_from_the_next_iteration_on_and_the_past_stays_as_it_was() -> None:
    totals = IterationTotals().now(100, 0)
    assert totals.now(100, 40) is totals
    changed = read_iteration_totals([list(since) for since in totals.now(200, 40).now(150, 60).since])
    assert [changed.iterations_at(iteration) for iteration in (0, 40, 41, 60, 61, 149)] == [
        100,
        100,
        200,
        200,
        150,
        150,
    ]


def test_of_a_journal_that_does_not_say_nothing_is_known() -> None:
    assert IterationTotals().iterations_at(3) == 0
