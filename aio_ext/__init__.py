"""Asynchronous file reads and writes over Linux libaio, and a checksum of memory. Knows no torch, no paths, no ranks.

    with aio_ext.Queue() as queue:
        ticket = queue.read(fd, buffer, offset, priority=aio_ext.DEMAND)
        ticket.wait()

The whole interface, and what it promises, is at the head of aio.c.
"""

try:
    from aio_ext._aio import DEMAND, PREFETCH, WRITE, Queue, Ticket, crc32c, direct_alignment, require_libaio
except ImportError as error:
    raise ImportError(
        f"aio_ext is not built ({error}): in a checkout run `make build`, or `python setup.py build_ext --inplace`; else `pip install .`"
    ) from error

__all__ = ["DEMAND", "PREFETCH", "WRITE", "Queue", "Ticket", "crc32c", "direct_alignment", "require_libaio"]
