"""Computes the host memory for gradients of late updates: the sums of [Note: late moments] in tiers/late_moments.py.

Knows sizes. Must not know memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from infinity.plan.packing import round_up

BLOCK_NBYTES = 128 << 10  # small: half a block per section is little waste, and a copy that holds the GIL is short
MOST_LATE = 2  # updates in a row; a third would save half a byte a parameter, and each read would replay half an update more
SLACK = 1.1  # largest ratio of a gradient's actual size to the expected size


def pool_for(gradients_nbytes: Sequence[int], left_nbytes: int) -> tuple[int, int]:
    """(bytes of a pool, largest number of late updates in a row), as large as useful and available; (0, 0) if too little memory is left.

    gradients_nbytes: approximate bytes of each record's gradient in a pool.
    """
    found = most_late(gradients_nbytes, left_nbytes)
    return needed_nbytes(gradients_nbytes, found), found


def most_late(gradients_nbytes: Sequence[int], pool_nbytes: int) -> int:
    """Largest number of late updates in a row for a pool of this size. gradients_nbytes: see `pool_for`."""
    fitting = (number for number in range(MOST_LATE, 0, -1) if 0 < needed_nbytes(gradients_nbytes, number) <= pool_nbytes)
    return next(fitting, 0)


def needed_nbytes(gradients_nbytes: Sequence[int], num_late: int) -> int:
    """Bytes of a pool for num_late updates in a row. gradients_nbytes: see `pool_for`."""
    mean = SLACK * sum(gradients_nbytes) * num_late / 2  # over the records' turns
    more = num_late * max(gradients_nbytes, default=0)  # a gradient may be stored before another one is freed
    return round_up(int(mean + more), BLOCK_NBYTES)
