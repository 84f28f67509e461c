"""Which files of a new checkpoint an earlier one has already, and which of those are to be read again.

Knows what the last checkpoint of an engine held, and counts of changes. Must not know who reads or writes when (save.py).

# [Note: what is linked]
# A file of records that have not changed since the last checkpoint on the same filesystem is linked: one inode then lies in several
# checkpoints, and what damages it damages all of them. So
#   - what is linked is read and summed meanwhile, in a thread of its own: as much as the save writes, and CHECK_NBYTES in any case, what
#     was not for longest first, so that the reading is hidden; all of it once in CHECK_EVERY saves. Where the sums are others, the file is
#     written anew, as the engine still has what belongs there, and a warning names it;
#   - once in RENEW_EVERY saves, by turns, a file is written anew: so many checkpoints share one, at most.
# A record of a linked file that is about to change before it was read is taken as any other, and the file is written.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aio_ext
from infinity.checkpoints.areas import Areas
from infinity.checkpoints.manifest import File
from infinity.checkpoints.reader import is_zero
from infinity.checkpoints.writer import Writer
from infinity.system.arena import PAGE_NBYTES
from infinity.tiers.chunk_state import ChunkState

CHECK_NBYTES = 4 << 30  # of what is linked, in each save: a few seconds of one drive
CHECK_EVERY = 4
RENEW_EVERY = 8


@dataclass(frozen=True)
class Linked:
    """A file of an earlier checkpoint that holds what this one's would, the checksums of its records by chunk, and for how many saves
    it has not been read."""

    path: Path
    crcs: dict[int, tuple[int, ...]]
    age: int = 0


@dataclass(frozen=True)
class LastSave:
    """What this rank wrote of the last checkpoint: its files, checksums, and how often each record had changed.

    number: how many this engine had saved before. ages: saves since each file was written or read.
    """

    folder: Path
    files: list[File]
    crcs: dict[int, tuple[int, ...]]
    changes: dict[int, int]
    number: int
    ages: dict[int, int]


def unchanged(
    last: LastSave | None, number: int, chunks: Sequence[ChunkState], files: list[File], places: Sequence[tuple[int, int]], root: Path
) -> dict[int, Linked]:
    """Files of the last checkpoint, by index, that hold what those of this one, of this number, would."""
    if last is None or [file.nbytes for file in last.files] != [file.nbytes for file in files]:
        return {}
    inside: dict[int, list[ChunkState]] = {}
    for chunk in chunks:
        inside.setdefault(places[chunk.index][0], []).append(chunk)
    found = {}
    for index, own in inside.items():
        path = last.folder / last.files[index].name
        still = all(_is_still(chunk, last) for chunk in own)
        in_turn = (number + index) % RENEW_EVERY == 0
        if still and not in_turn and _is_file(path, files[index].nbytes, root):
            found[index] = Linked(path, {chunk.index: last.crcs[chunk.index] for chunk in own}, last.ages[index])
    return found


def to_read(linked: dict[int, Linked], files: list[File]) -> list[int]:
    """Which of them are to be read and summed, in this order."""
    left = max(sum(file.nbytes for index, file in enumerate(files) if index not in linked), CHECK_NBYTES)
    found = []
    for index in sorted(linked, key=lambda index: -linked[index].age):
        if left > 0 or linked[index].age + 1 >= CHECK_EVERY:
            found.append(index)
            left -= files[index].nbytes
    return found


def is_whole(chunk: ChunkState, crcs: tuple[int, ...], writer: Writer, areas: Areas) -> bool:
    """Whether a record of a linked file has its sums still, and zero behind each segment. Raises what `Areas.area` does."""
    record = chunk.record
    for segment, offset, expected in zip(record.segments, record.offsets, crcs):
        nbytes, crc = segment.nbytes(record.numel), 0
        for begin in range(0, nbytes, areas.nbytes):
            count = min(areas.nbytes, nbytes - begin)
            with areas.area() as (region, _):
                part = region.buffer[: -(-count // PAGE_NBYTES) * PAGE_NBYTES]
                try:
                    writer.read(chunk.index, offset + begin, part).wait()
                except OSError:  # the drive has lost it
                    return False
                if not is_zero(part[count:]):
                    return False
                crc = aio_ext.crc32c(part[:count], crc)
        if crc != expected:
            return False
    return True


def _is_still(chunk: ChunkState, last: LastSave) -> bool:
    is_idle = not chunk.update.is_announced and not chunk.update.is_running
    return is_idle and last.changes.get(chunk.index) == chunk.num_changes


def _is_file(path: Path, nbytes: int, beside: Path) -> bool:
    try:
        status = os.stat(path, follow_symlinks=False)
        return status.st_size == nbytes and status.st_dev == os.stat(beside).st_dev
    except OSError:
        return False
