"""Opens and reads an ordinary file.

Knows kinds of files: a read of a pipe may block for ever, and a device may have no end. Must not know the reader or the content of a file.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO


def open_ordinary(path: str | os.PathLike) -> BinaryIO:
    """Open a file to read bytes. Never blocks. Raises OSError with errno and path for a directory, a pipe, a socket or a device."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a blocking open of a pipe waits for a writer
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return open(fd, "rb")
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "a pipe, a socket or a device; expected an ordinary file", str(path))


def read_ordinary(path: str | os.PathLike, most_nbytes: int) -> bytes:
    """All bytes of a file. Raises OSError with errno and path, as `open_ordinary`, and for a file larger than `most_nbytes`."""
    with open_ordinary(path) as file:
        data = file.read(most_nbytes + 1)
    if len(data) > most_nbytes:
        raise OSError(errno.EFBIG, f"expected at most {most_nbytes:,} bytes; name another file", str(path))
    return data
