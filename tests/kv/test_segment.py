"""Room in a segment: what is handed out never overlaps, what is given back joins again."""

import random

import numpy as np

from kv.segment import ALIGNMENT, HEAD_BYTES, Segment, number_at


def test_room_never_overlaps_and_all_of_it_comes_back() -> None:
    chance = random.Random(3)
    memory = np.zeros(256 * ALIGNMENT + 100, np.uint8)
    segment = Segment(memory)
    taken: dict[int, tuple[int, int]] = {}
    refused = 0
    for _ in range(5000):
        if taken and chance.random() < 0.5:
            offset = chance.choice(list(taken))
            number, nbytes = taken.pop(offset)
            assert number_at(memory, offset) == number
            segment.give_back(offset)
            assert number_at(memory, offset) == 0
            continue
        nbytes = chance.choice([0, 1, ALIGNMENT - HEAD_BYTES, ALIGNMENT, 40 * ALIGNMENT])
        room = segment.take(nbytes)
        if room is None:
            refused += 1
            continue
        offset, number = room
        assert offset % ALIGNMENT == 0
        assert number not in {number for number, _ in taken.values()}
        end = offset + HEAD_BYTES + nbytes
        assert end <= memory.nbytes
        for other, (_, size) in taken.items():
            assert end <= other or other + HEAD_BYTES + size <= offset
        taken[offset] = number, nbytes
    assert refused > 10
    for offset in taken:
        segment.give_back(offset)
    assert segment.take(256 * ALIGNMENT - HEAD_BYTES) is not None
    assert segment.take(0) is None
