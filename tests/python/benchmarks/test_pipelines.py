"""The bound of the pipelines' benchmark, on cases worked out by hand."""

import collections

import pytest
from pipelines import shared_bound

from torch_lowcomm.planner import schedule as bound


def step(schedule, times, link, *, stages=2, micro_batches=2, ahead=0):
    orders = [bound.order(schedule, stage, stages, micro_batches, ahead) for stage in range(stages)]
    return bound.step_s(orders, times, link)


def times(forward=1.0, backward=2.0, size=0.0, stages=2):
    return bound.Times([forward] * stages, [backward] * stages, [size] * (stages - 1), [size] * (stages - 1))


def test_orders():
    assert bound.order("GPipe", 1, 2, 2) == [("F", 0), ("F", 1), ("B", 0), ("B", 1)]
    first = [("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("B", 2)]
    assert bound.order("1F1B", 0, 2, 3) == first
    assert bound.order("1F1B", 0, 2, 3, ahead=1) == bound.order("GPipe", 0, 2, 3)
    assert bound.order("1F1B", 1, 2, 3, ahead=5) == [(kind, i) for i in range(3) for kind in "FB"]
    assert [kind for kind, _ in bound.order("1F1B", 0, 4, 20, ahead=2)].index("B") == 4 + 2 * 3
    with pytest.raises(ValueError, match="expected one of GPipe, 1F1B, got 'ZBV'"):
        bound.order("ZBV", 0, 2, 2)


# A forward takes 1 s, a backward 2 s, a link 1 byte/s. The first stage's two backwards follow each other in all of them but one.
@pytest.mark.parametrize(
    ("link", "size", "expected"),
    [
        # Second stage: forwards end at 2 and 3, backwards at 5 and 7; the first one's backwards at 7 and 9.
        (bound.Direction(1, 0), 0, 9),
        # Arrivals at 11 and 12, backwards end at 15 and 17, gradients arrive at 25 and 27, backwards end at 27 and 29.
        (bound.Direction(1, 10), 0, 29),
        # 4 s a message: arrivals at 5 and 9; forwards end at 6 and 10, backwards at 12 and 14; gradients at 16 and 20.
        (bound.Direction(1, 0), 4, 22),
        # 3 of 4 bytes are free after a pause: arrivals at 2 and 6; 3 and 7, 9 and 11; gradients at 10 and 14; 12 and 16.
        (bound.Direction(1, 0, 3), 4, 16),
    ],
)
def test_the_bound_of_gpipe(link, size, expected):
    assert step("GPipe", times(size=size), link) == pytest.approx(expected)


def test_the_bound_of_1f1b():
    link = bound.Direction(1, 10)
    # The first stage: forwards end at 1, 2. The second: 11-12, 12-14 (B0); its F1 14-15, B1 15-17. Gradients arrive at 24, 27.
    # B0 24-26, F2 26-27, B1 27-29, F3 29-30. The second: F2 37-38, B2 38-40, F3 40-41, B3 41-43. B2 50-52, B3 53-55.
    assert step("1F1B", times(), link, micro_batches=4) == pytest.approx(55)
    # Two more: all forwards end at 4. The second stage: 11-14, 14-17, 17-20, 20-23. The first: 24-26 and on, 33-35.
    assert step("1F1B", times(), link, micro_batches=4, ahead=2) == pytest.approx(35)


def test_the_bound_of_three_stages():
    # Forwards of the last stage end at 3, its backwards at 5 and 8 (1F1B); those of the first at 9 and 12.
    assert step("1F1B", times(stages=3), bound.Direction(1, 0), stages=3) == pytest.approx(12)


@pytest.mark.parametrize("simulation", [bound, shared_bound], ids=["bound", "shared_bound"])
def test_orders_that_never_end(simulation):
    with pytest.raises(ValueError, match="expected ones that end"):
        simulation.step_s([[("B", 0)], [("F", 0)]], times(), bound.Direction(1, 0))


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize(
    "link", [bound.Direction(1, 0), bound.Direction(2, 3), bound.Direction(0.7, 0.2, 0.5)], ids=str
)
def test_two_stages_have_a_link_each(schedule, link):
    """Each of two stages sends one way only."""
    orders = [bound.order(schedule, stage, 2, 6) for stage in range(2)]
    one = bound.Times([0.3, 0.5], [0.4, 1.1], [0.8], [1.7])
    assert shared_bound.step_s(orders, one, link) == pytest.approx(bound.step_s(orders, one, link))


def test_streams_share_a_link():
    host = shared_bound.Host(bound.Direction(1, 0), (collections.deque(), collections.deque()))
    first, second = (1, "F", 0, 0), (0, "B", 0, 0)
    host.send(first, 4, 0, now=0)
    assert host.next_s() == 4
    assert host.go_on(2, now=2) == []
    host.send(second, 4, 1, now=2)  # each has half of the link from here on: 2 of the first one are left
    assert host.next_s() == pytest.approx(4)
    assert host.go_on(4, now=6) == [first]
    assert host.next_s() == pytest.approx(2)
    assert host.go_on(2, now=8) == [second]
    orders = [bound.order("1F1B", stage, 3, 4) for stage in range(3)]
    three, link = times(forward=0.0, backward=0.0, size=1.0, stages=3), bound.Direction(1, 0)
    assert shared_bound.step_s(orders, three, link) > bound.step_s(orders, three, link)
