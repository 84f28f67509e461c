"""Errors of swap: the failed work, the place and the remedy.

Knows error numbers and paths. Must not know the data in swap.
"""

import errno

from infinity.errors import NO_DESCRIPTORS, SwapError

REMEDIES = {
    errno.EBADMSG: "see dmesg, and name another directory in `swap_dirs`; the last checkpoint does not depend on swap files",
    errno.EIO: "the drive failed or the file was cut: see dmesg, and use another directory",
    errno.ENOSPC: "free space there or name another directory",
    errno.ENOMEM: "free memory, or raise the limit of this process's control group",
    errno.EDQUOT: "raise the quota or name another directory",
    errno.EINVAL: "pass memory, offsets and sizes that are multiples of 4096",
    errno.EFBIG: "raise the file size limit (ulimit -f)",
    errno.EROFS: "the filesystem went read-only: see dmesg",
    errno.EACCES: "choose a directory that this user may write",
    errno.EPERM: "choose a directory that this user owns",
    **NO_DESCRIPTORS,
}


def swap_error(code: int | None, text: str, path) -> SwapError:
    remedy = REMEDIES.get(code)
    return SwapError(errno.EIO if code == errno.EBADMSG else code, f"{text}; {remedy}" if remedy else text, str(path))


def changed_error(what: str, where: str, path) -> SwapError:
    """The error for bytes that differ from the written ones. what: begins the text, as in `Swap.read`. where: position in the file, or "".
    path: of the file.
    """
    return swap_error(errno.EBADMSG, f"{what}the drive returned other bytes than were written{where}", path)
