"""The order of rows is a pure function of seed and epoch; a run's way through it is two numbers."""

import json

import pytest

from openrlhf.datasets.sampler import PromptCursor, epoch_order


def test_every_epoch_has_every_row_once_in_its_own_order():
    first, second = (epoch_order(100, 7, epoch).tolist() for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second
    assert first == epoch_order(100, 7, 0).tolist()
    assert first != epoch_order(100, 8, 0).tolist()


@pytest.mark.parametrize("num_rows", [1, 2, 5, 8])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
def test_draws_give_every_row_once_per_episode_and_never_span_two(num_rows, batch_size):
    cursor = PromptCursor(num_rows, 1, num_episodes=2)
    by_episode = {0: [], 1: []}
    num_draws = 0
    while not cursor.is_exhausted:
        episode = cursor.episode
        by_episode[episode] += cursor.draw(batch_size)
        num_draws += 1
    assert sorted(by_episode[0]) == sorted(by_episode[1]) == list(range(num_rows))
    assert num_draws == 2 * -(-num_rows // batch_size)
    assert cursor.draw(batch_size) == []


@pytest.mark.parametrize("num_before", range(7))
def test_a_restored_cursor_goes_on_where_it_stood(num_before):
    straight = PromptCursor(5, 3, num_episodes=2)
    for _ in range(num_before):
        straight.draw(2)
    resumed = PromptCursor(5, 3, num_episodes=2)
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    rest = [(straight.draw(2), resumed.draw(2)) for _ in range(7)]
    assert all(a == b for a, b in rest)
