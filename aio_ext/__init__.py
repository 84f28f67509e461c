"""Asynchronous file reads and writes over Linux libaio, and CRC-32C of memory. Knows no torch, no paths, no ranks.

    with aio_ext.Queue() as queue:
        ticket = queue.read(fd, buffer, offset, priority=aio_ext.DEMAND)
        ticket.wait()

The comment at the head of aio.c describes the whole interface, with all guarantees.
"""

try:
    from aio_ext._aio import DEMAND, PREFETCH, WRITE, Queue, Ticket, crc32c, direct_alignment, require_libaio
except ImportError as error:
    raise ImportError(
        f"aio_ext is not built ({error}): in a checkout run `make build`, or `python setup.py build_ext --inplace`; else `pip install .`"
    ) from error

__all__ = ["DEMAND", "PREFETCH", "WRITE", "Queue", "Ticket", "crc32c", "direct_alignment", "require_libaio"]
