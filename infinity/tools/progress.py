"""Lines of progress, on standard error.

Knows terminals, counts and seconds. Must not know what is counted.
"""

import contextlib
import math
import shutil
import statistics
import sys
import time

from infinity.sizes import format_bytes

PROGRESS_SECONDS = 5  # between lines, if standard error is no terminal


class Progress:
    """Progress of counted work on standard error. A terminal shows the last text only; other outputs receive a line every few seconds.

    One thread calls it. As a context manager, Progress ends the line also after an error, so that the error begins on a new line.
    """

    def __init__(self, live_seconds=0.0, stream=None):
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty()
        self.pause_seconds = live_seconds if self.live else PROGRESS_SECONDS
        self.printed = -math.inf
        self.num_lines = 1  # on the terminal

    def show(self, text, *, last=False):
        """Write the text if enough time has passed, or if last."""
        now = time.monotonic()
        if now - self.printed < self.pause_seconds and not last:
            return
        self.printed = now
        self.stream.write(self._in_place(text) if self.live else f"{text}\n")
        self.stream.flush()

    def _in_place(self, text):
        """The text with control characters that overwrite the previous text. Lines are cut at the width of the terminal."""
        width = shutil.get_terminal_size().columns - 1
        lines = [line[:width] for line in text.splitlines()] or [""]
        up, self.num_lines = self.num_lines - 1, len(lines)
        below = "\x1b[J" if up else ""
        return "\r" + (f"\x1b[{up}A" if up else "") + "\x1b[K\n".join(lines) + "\x1b[K" + below

    def finish(self):
        if self.live and self.printed > -math.inf:
            self.stream.write("\n")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.finish()


class StepProgress(Progress):
    """Progress of training. Called after each step with the number of the step from 0, the loss, and the seconds of each step so far."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def __call__(self, step, loss, seconds):
        pace = statistics.median(seconds[-10:])
        left = pace * (self.steps - step - 1)
        line = f"step {step + 1}/{self.steps}  loss {loss:.3f}  {pace:.2f} s a step  {left:.0f} s left"
        self.show(line, last=step + 1 >= self.steps)


class BytesProgress(Progress):
    """Progress of long file work: called with (done_nbytes, total_nbytes), at any rate. `done` is a verb, such as "saved".

    On a terminal tqdm draws the progress, if tqdm is installed.
    """

    def __init__(self, done):
        super().__init__(live_seconds=0.1)
        self.done = done
        self.is_complete = False
        self.started = time.monotonic()
        self.bar = _tqdm(desc=done, unit="B", unit_scale=True) if self.live else None

    def __call__(self, done_nbytes, total_nbytes):
        if self.bar is not None:
            self.bar.total = total_nbytes
            self.bar.update(done_nbytes - self.bar.n)
            return
        seconds = time.monotonic() - self.started
        rate = done_nbytes / seconds if seconds else 0.0
        total, done = format_bytes(total_nbytes), format_bytes(done_nbytes)
        unit = total[total.index(" ") :]
        share = done_nbytes / total_nbytes if total_nbytes else 1.0
        line = f"{self.done} {done.removesuffix(unit)} of {total}  {100 * share:.0f} %"
        if rate:
            speed = f"{rate / 1e9:.1f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.0f} MB/s"
            line += f"  {speed}  {(total_nbytes - done_nbytes) / rate:.0f} s left"
        is_last = done_nbytes >= total_nbytes
        if not (is_last and self.is_complete):  # the last call comes again while the kernel writes the last bytes to the disk
            self.show(line, last=is_last)
        self.is_complete = is_last

    def finish(self):
        if self.bar is None:
            super().finish()
        else:
            self.bar.close()


def _tqdm(**options):
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(**options)


def bytes_progress(shown, done):
    """A context manager: a BytesProgress if shown, otherwise None."""
    return BytesProgress(done) if shown else contextlib.nullcontext()
