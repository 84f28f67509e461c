"""Trace files: the events of all ranks as JSON, for Perfetto (https://ui.perfetto.dev) and chrome://tracing. Also reads these files.

Knows events, titles of their lanes, and the file format. Must not know how events are recorded, or how a run is analysed (breakdown.py).
"""

# [Note: one clock for all ranks]
# All ranks of one machine share the monotonic clock of the events. Each machine has an offset: wall clock minus monotonic clock. Times of
# another machine are shifted by the difference of the two offsets. The shift is as exact as the wall clocks agree.

# [Note: rows of a lane]
# Perfetto draws overlapping events of one thread only if they are nested. Transfers overlap without nesting. A lane therefore has several
# rows, each a thread of its own. A transfer that begins while all rows of its lane are busy opens another row.

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from infinity.config import checked_path
from infinity.engine.engine import Engine
from infinity.engine.engines import engine_of
from infinity.errors import UsageError
from infinity.ordinary_file import open_ordinary
from infinity.output import check_file, write_text
from infinity.renamed import LINKS as OLD_LINKS
from infinity.system.events import COMPUTE, SLOTS, STALL, STEP, Event, now

LANES = {  # in display order
    STEP: "steps",
    COMPUTE: "device compute",
    STALL: "waits",
    **{link: link for link in ("all_gather", "h2d", "nvme_read", "update", "reduce_scatter", "d2h", "nvme_write")},
}
SLOTS_COUNTER, QUEUE_COUNTER, RATE_COUNTER = "slots in use", "bytes queued", "GB/s"
FORMAT = 1  # version, in otherData["infinity"]
_DRIVES = {"nvme_read": "read", "nvme_write": "written"}
_DETAIL = {COMPUTE: "phase", STALL: "link"}
_ROWS = 1000  # most rows of a lane


@dataclass(frozen=True, slots=True)
class Slice:
    """A named event. Times in seconds since the trace began. detail: the phase of a COMPUTE event, the link of a STALL event."""

    lane: str
    name: str
    start: float
    end: float
    nbytes: int = 0
    detail: str = ""


@dataclass
class RankTrace:
    """The events of one rank, by start. samples: (seconds, slots in use by kind).

    num_left_out: events that did not fit into the trace. complete_since: from this time on, in seconds, the trace has all events.
    """

    rank: int
    slices: list[Slice]
    samples: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    num_left_out: int = 0
    complete_since: float = 0.0


def save_trace(path: str | os.PathLike[str], model: nn.Module) -> None:
    """Write the trace of a model's engine so far, with the events of all ranks, into one file. Needs Config(trace=True).

    All ranks must make this call, before the engine is closed. Rank 0 writes the file. The call waits for the device. Raises UsageError if
    the trace is empty, ConfigError if the path cannot be a file.
    """
    path, engine = checked_path(path), engine_of(model)
    if not engine.events.tracing:
        raise UsageError("save_trace: nothing was traced; use infinity.Config(trace=True)")

    def check() -> None:
        if not engine.events.trace:
            raise UsageError("save_trace: nothing has run yet; call it after some steps")
        if engine.ranks.is_first:
            check_file(path, "the trace")

    engine.ranks.together(check)
    engine.events.timeline.resolve(wait=True)
    parts = engine.ranks.exchange(zlib.compress(json.dumps(_noted(engine)).encode()))
    if engine.ranks.is_first:
        write_trace(path, joined([json.loads(zlib.decompress(part)) for part in parts]))


def trace_of(engine: Engine) -> RankTrace:
    """The trace of this rank so far."""
    engine.events.timeline.resolve(wait=True)
    return joined([_noted(engine)])[0]


def write_trace(path: Path, ranks: list[RankTrace]) -> None:
    write_text(path, json.dumps(to_perfetto(ranks), separators=(",", ":")) + "\n")


def read_trace(path: Path) -> list[RankTrace]:
    """The inverse of `write_trace`. Raises UsageError if the file is unreadable, or no trace of this engine."""
    try:
        with open_ordinary(path) as file:
            value = json.load(file)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no trace, or is cut off: the file is not complete JSON ({error})") from error
    about = value.get("otherData") if isinstance(value, dict) else None
    version = about.get("infinity") if isinstance(about, dict) else None
    if version is None:
        raise UsageError(f"{path} is not a trace of this engine, such as `infinity train --trace FILE` writes")
    if version != FORMAT:
        raise UsageError(f"{path} is a trace of format {version}, expected {FORMAT}: use the version of infinity that wrote it")
    try:
        return _from_perfetto(value)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is a damaged trace: {type(error).__name__}: {error}") from error


# The data that each rank sends to rank 0.


def _noted(engine: Engine) -> dict:
    """This rank's trace in types of JSON, with the data that relates this machine's clock to others."""
    events = engine.events
    titles = {chunk.index: chunk.title for chunk in engine.registry.chunks}
    noted = events.trace
    return {
        "machine": Path("/proc/sys/kernel/random/boot_id").read_text(),
        "wall_offset": time.time() - now(),
        "num_left_out": events.num_left_out,
        "complete_since": events.complete_since,
        "events": [_named(event, titles) for event in noted if event.lane != SLOTS],
        "samples": [(event.start, event.what) for event in noted if event.lane == SLOTS],
    }


def _named(event: Event, titles: dict[int, str]) -> tuple:
    """The fields of a Slice."""
    what, detail = event.what, ""
    if event.lane == STEP:
        name = f"step {what}"
    elif event.lane == COMPUTE:
        detail, name = what
    elif event.lane == STALL:
        detail, name = what[0], titles.get(what[1], what[1])
    else:
        index, *kind = what if isinstance(what, tuple) else (what,)
        name = " ".join([titles.get(index, str(index)), *kind])
    return event.lane, name, event.start, event.end, event.nbytes, detail


def joined(noted: list[dict]) -> list[RankTrace]:
    """The traces of all ranks by the clock of rank 0, in seconds since the first event began."""
    first = noted[0]
    ahead = [0.0 if n["machine"] == first["machine"] else n["wall_offset"] - first["wall_offset"] for n in noted]
    begin = min(event[2] + shift for n, shift in zip(noted, ahead) for event in n["events"])
    ranks = []
    for rank, (n, shift) in enumerate(zip(noted, ahead)):

        def at(seconds, shift=shift):
            return max(round(seconds + shift - begin, 9), 0.0)

        slices = [Slice(lane, name, at(start), at(end), *rest) for lane, name, start, end, *rest in n["events"]]
        slices.sort(key=lambda piece: (piece.start, -piece.end))
        samples = [(at(seconds), counts) for seconds, counts in n["samples"]]
        ranks.append(RankTrace(rank, slices, samples, n["num_left_out"], at(n["complete_since"]) if n["num_left_out"] else 0.0))
    return ranks


# The file.


def to_perfetto(ranks: list[RankTrace]) -> dict:
    """The value that the file holds as JSON. ts and dur are microseconds; a rank is a process, a row of a lane a thread."""
    about, found = [], []
    for trace in ranks:
        about += _meta(trace.rank, 0, "process", f"rank {trace.rank}", trace.rank)
        rows: dict[str, list[float]] = {lane: [] for lane in LANES}
        for piece in trace.slices:
            row = _row(rows[piece.lane], piece)
            args = {"bytes": piece.nbytes} if piece.nbytes else {}
            if piece.lane in _DETAIL:
                args[_DETAIL[piece.lane]] = piece.detail
            start = _us(piece.start)
            name = f"{piece.name} {piece.detail}" if piece.lane == COMPUTE else piece.name
            tid = _tid(piece.lane, row)
            duration = round(_us(piece.end) - start, 3)
            event = {"ph": "X", "cat": piece.lane, "name": name, "pid": trace.rank, "tid": tid, "ts": start, "dur": duration}
            found.append(event | ({"args": args} if args else {}))
        for lane, ends in rows.items():
            for row in range(len(ends)):
                about += _meta(trace.rank, _tid(lane, row), "thread", LANES[lane] + (f" {row + 1}" if row else ""), _tid(lane, row))
        found += _counter(trace.rank, SLOTS_COUNTER, trace.samples)
        found += _counter(trace.rank, QUEUE_COUNTER, _queued(trace.slices))
        found += _counter(trace.rank, RATE_COUNTER, _rates(trace.slices))
    found.sort(key=lambda event: event["ts"])
    left_out = [{"rank": t.rank, "num_left_out": t.num_left_out, "complete_since": _us(t.complete_since)} for t in ranks]
    return {"displayTimeUnit": "ms", "otherData": {"infinity": FORMAT, "ranks": left_out}, "traceEvents": about + found}


def _from_perfetto(value: dict) -> list[RankTrace]:
    ranks = {
        about["rank"]: RankTrace(about["rank"], [], [], about["num_left_out"], round(about["complete_since"] / 1e6, 9))
        for about in value["otherData"]["ranks"]
    }
    for event in value["traceEvents"]:
        trace = ranks[event["pid"]]
        if event["ph"] == "X":
            lane, args = OLD_LINKS.get(event["cat"], event["cat"]), event.get("args", {})
            detail = args[_DETAIL[lane]] if lane in _DETAIL else ""
            detail = OLD_LINKS.get(detail, detail) if lane == STALL else detail
            name = event["name"].removesuffix(f" {detail}") if lane == COMPUTE else event["name"]
            start, end = round(event["ts"] / 1e6, 9), round((event["ts"] + event["dur"]) / 1e6, 9)
            trace.slices.append(Slice(lane, name, start, end, args.get("bytes", 0), detail))
        elif event["ph"] == "C" and event["name"] == SLOTS_COUNTER:
            trace.samples.append((round(event["ts"] / 1e6, 9), event["args"]))
    for trace in ranks.values():
        trace.slices.sort(key=lambda piece: (piece.start, -piece.end))
    if not ranks:
        raise ValueError("the trace has no rank")
    return [ranks[rank] for rank in sorted(ranks)]


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _tid(lane: str, row: int) -> int:
    return list(LANES).index(lane) * _ROWS + row


def _row(ends: list[float], piece: Slice) -> int:
    """The first row of a lane that is free when the event begins; see [Note: rows of a lane]."""
    row = next((row for row, end in enumerate(ends) if end <= piece.start), len(ends))
    ends[row : row + 1] = [piece.end]
    return row


def _meta(pid: int, tid: int, what: str, name: str, order: int) -> list[dict]:
    common = {"ph": "M", "pid": pid, "tid": tid}
    return [
        common | {"name": f"{what}_name", "args": {"name": name}},
        common | {"name": f"{what}_sort_index", "args": {"sort_index": order}},
    ]


def _counter(pid: int, name: str, values: Iterable[tuple[float, dict]]) -> list[dict]:
    return [{"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": _us(at), "args": args} for at, args in values]


def _queued(slices: list[Slice]) -> list[tuple[float, dict[str, int]]]:
    """Returns (seconds, bytes by direction) at each change: the bytes of all active drive requests."""
    return _sums(slices, lambda piece: piece.nbytes, {name: 0 for name in _DRIVES.values()})


def _rates(slices: list[Slice]) -> list[tuple[float, dict[str, float]]]:
    """Returns (seconds, GB/s by direction) at each change. Each request has its mean rate, so the integral over time is the bytes moved."""
    sums = _sums(slices, lambda piece: round(piece.nbytes / max(piece.end - piece.start, 1e-9)), {name: 0 for name in _DRIVES.values()})
    return [(at, {name: round(rate / 1e9, 6) for name, rate in rates.items()}) for at, rates in sums]


def _sums(slices: list[Slice], weight, sums: dict[str, int]) -> list[tuple[float, dict[str, int]]]:
    """Returns (seconds, sum of weights by direction) of active drive requests, at each change. Integer weights make sums return to zero."""
    changes = [(piece.start, _DRIVES[piece.lane], weight(piece)) for piece in slices if piece.lane in _DRIVES]
    changes += [(piece.end, _DRIVES[piece.lane], -weight(piece)) for piece in slices if piece.lane in _DRIVES]
    found: list[tuple[float, dict[str, int]]] = []
    for at, name, change in sorted(changes):
        sums[name] += change
        if found and found[-1][0] == at:
            found.pop()
        found.append((at, dict(sums)))
    return found
