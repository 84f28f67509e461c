"""Files of the last checkpoint that a new checkpoint may share by hard links, and the check of these files.

Knows the content of an engine's last checkpoint, and the versions of the engine's records. Must not know which thread reads or writes, or
when (save.py).

# [Note: linked files]
# If no record of a file has changed since the last checkpoint on the same filesystem, the new checkpoint links the file. One inode then
# belongs to several checkpoints, and damage of the inode damages all of them. Two rules limit this damage:
#   - During a save, one thread reads linked files and compares their checksums. The thread reads as many bytes as the save writes, and at
#     least CHECK_NBYTES. Files that were not read for the longest time come first. Each file is read at least once in CHECK_EVERY saves. If
#     checksums differ, the save writes the file again from the engine's records, and a warning names the damaged file.
#   - Each file is written again once in RENEW_EVERY saves, in turn. Thus at most RENEW_EVERY checkpoints share one inode.
# If a record of an unread linked file is about to change, the snapshot copies the record, and the save writes the file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aio_ext
from infinity.checkpoints.manifest import File
from infinity.checkpoints.reader import is_zero
from infinity.checkpoints.writer import Writer
from infinity.plan.record import Record
from infinity.system.arena import PAGE_NBYTES
from infinity.system.staging_buffers import StagingBuffers

CHECK_NBYTES = 4 << 30  # least bytes of linked files that a save reads: a few seconds of one drive
CHECK_EVERY = 4
RENEW_EVERY = 8


@dataclass(frozen=True)
class Linked:
    """A file of an earlier checkpoint with the bytes of a file of the new checkpoint.

    crcs: checksums of the file's records, by chunk. age: number of saves since the file was read.
    """

    path: Path
    crcs: dict[int, tuple[int, ...]]
    age: int = 0


@dataclass(frozen=True)
class LastSave:
    """This rank's part of the last checkpoint. crcs, versions: of this rank's records, by chunk.

    number: the engine's count of earlier checkpoints. ages: number of saves since each file was written or read.
    """

    folder: Path
    files: list[File]
    crcs: dict[int, tuple[int, ...]]
    versions: dict[int, int]
    number: int
    ages: dict[int, int]


def unchanged(
    last: LastSave | None, number: int, versions: Sequence[int], files: list[File], places: Sequence[tuple[int, int]], root: Path
) -> dict[int, Linked]:
    """The files of the last checkpoint that the new checkpoint may link, by index. number: of the new one. versions, places: by chunk."""
    if last is None or [file.nbytes for file in last.files] != [file.nbytes for file in files]:
        return {}
    inside: dict[int, list[int]] = {}
    for index, (file, _) in enumerate(places):
        inside.setdefault(file, []).append(index)
    found = {}
    for file, indices in inside.items():
        path = last.folder / last.files[file].name
        is_same = all(last.versions.get(index) == versions[index] for index in indices)
        in_turn = (number + file) % RENEW_EVERY == 0
        if is_same and not in_turn and _is_file(path, files[file].nbytes, root):
            found[file] = Linked(path, {index: last.crcs[index] for index in indices}, last.ages[file])
    return found


def to_read(linked: dict[int, Linked], files: list[File]) -> list[int]:
    """The indices of the linked files that this save reads, in this order."""
    left = max(sum(file.nbytes for index, file in enumerate(files) if index not in linked), CHECK_NBYTES)
    found = []
    for index in sorted(linked, key=lambda index: -linked[index].age):
        if left > 0 or linked[index].age + 1 >= CHECK_EVERY:
            found.append(index)
            left -= files[index].nbytes
    return found


def is_whole(index: int, record: Record, crcs: tuple[int, ...], writer: Writer, buffers: StagingBuffers) -> bool:
    """Whether the record of chunk `index` in a linked file has these checksums, and zeros behind each segment.

    Raises the errors of `StagingBuffers.take`.
    """
    for segment, offset, expected in zip(record.segments, record.offsets, crcs):
        nbytes, crc = segment.nbytes(record.numel), 0
        for begin in range(0, nbytes, buffers.nbytes):
            count = min(buffers.nbytes, nbytes - begin)
            buffer = buffers.take()
            try:
                part = buffer.region.buffer[: -(-count // PAGE_NBYTES) * PAGE_NBYTES]
                writer.read(index, offset + begin, part).wait()
                if not is_zero(part[count:]):
                    return False
                crc = aio_ext.crc32c(part[:count], crc)
            except OSError:  # the drive has lost the bytes
                return False
            finally:
                buffer.release()
        if crc != expected:
            return False
    return True


def _is_file(path: Path, nbytes: int, beside: Path) -> bool:
    try:
        status = os.stat(path, follow_symlinks=False)
        return status.st_size == nbytes and status.st_dev == os.stat(beside).st_dev
    except OSError:
        return False
