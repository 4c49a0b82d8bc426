"""The buffer: first in, first out, seeded draws, and the same after a checkpoint."""

import io
import random

import numpy as np
import torch

from mage_async.methods.sac_glam.replay_buffer import ARRAYS, ReplayBuffer, SoftSequence


def sequence(number, length=2):
    """A segment that can be told from others."""
    return SoftSequence(
        np.arange(length * 3, dtype=np.int32) + number,
        np.arange(length, dtype=np.int64) * 3 + 2,
        np.full(length, number % 4, np.int64),
        np.eye(4, dtype=bool)[np.full(length, number % 4)],
        np.full(length, number / 2, np.float32),
        np.full(length, 0.9, np.float32),
        number,
    )


def trial(number, copies):
    return tuple((sequence(10 * number + copy, 1 + copy),) for copy in range(copies))


def numbers(drawn):
    return [part.version for copy in drawn for part in copy]


def test_the_oldest_trials_make_room():
    buffer = ReplayBuffer()
    buffer.add([trial(number, 1) for number in range(5)], capacity=3)
    assert len(buffer) == 3
    assert set(numbers(buffer.draw(50, random.Random(0)))) == {20, 30, 40}


def test_a_draw_takes_a_trial_or_one_of_its_copies():
    buffer = ReplayBuffer()
    buffer.add([trial(0, 1), trial(1, 4)], capacity=8)
    drawn = numbers(buffer.draw(4000, random.Random(0)))
    assert drawn.count(0) / 4000 > 0.45
    assert {10, 11, 12, 13} == set(drawn) - {0}
    assert numbers(buffer.draw(9, random.Random(7))) == numbers(buffer.draw(9, random.Random(7)))


def test_a_checkpoint_gives_the_same_buffer_back():
    buffer, again = ReplayBuffer(), ReplayBuffer()
    two_segments = ((sequence(3), sequence(4, 5)),)
    buffer.add([trial(0, 2), two_segments, trial(2, 3)], capacity=8)
    file = io.BytesIO()
    torch.save(buffer.state(), file)
    file.seek(0)
    again.restore(torch.load(file, weights_only=True))
    one, other = (each.draw(60, random.Random(1)) for each in (buffer, again))
    assert numbers(one) == numbers(other)
    for left, right in zip(one, other, strict=True):
        for a, b in zip(left, right, strict=True):
            for name in ARRAYS:
                assert getattr(a, name).dtype == getattr(b, name).dtype
                assert getattr(a, name).tolist() == getattr(b, name).tolist()


def test_an_empty_buffer_is_kept_too():
    again = ReplayBuffer()
    again.restore(ReplayBuffer().state())
    assert len(again) == 0
