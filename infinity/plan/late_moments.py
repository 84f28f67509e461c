"""How much host memory the gradients of late updates take: the sums of [Note: late moments] in tiers/late_moments.py.

Knows sizes. Must not know memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from infinity.plan.packing import round_up

BLOCK_NBYTES = 128 << 10  # so small that half of one a section is little, and a copy short that holds the GIL
MOST_LATE = 2  # updates in a row; a third would save half a byte a parameter more and have each read do half an update more
SLACK = 1.1  # gradients take up to so much more than they should


def pool_for(gradients_nbytes: Sequence[int], left_nbytes: int) -> tuple[int, int]:
    """(bytes of a pool, updates in a row that may be late by it), as large as is of use and left; (0, 0) where too little is.

    gradients_nbytes: about what a gradient of each record takes in a pool.
    """
    found = most_late(gradients_nbytes, left_nbytes)
    return needed_nbytes(gradients_nbytes, found), found


def most_late(gradients_nbytes: Sequence[int], pool_nbytes: int) -> int:
    """How many updates in a row may be late by a pool of that many bytes. gradients_nbytes: as of `pool_for`."""
    fitting = (number for number in range(MOST_LATE, 0, -1) if 0 < needed_nbytes(gradients_nbytes, number) <= pool_nbytes)
    return next(fitting, 0)


def needed_nbytes(gradients_nbytes: Sequence[int], num_late: int) -> int:
    """Of a pool for so many updates in a row. gradients_nbytes: as of `pool_for`."""
    mean = SLACK * sum(gradients_nbytes) * num_late / 2  # over the records' turns
    more = num_late * max(gradients_nbytes, default=0)  # who takes may come before who gives back
    return round_up(int(mean + more), BLOCK_NBYTES)
