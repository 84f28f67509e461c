"""The `trace` command: the busy share of each lane of a trace, and the share of the step that waited for the lane.

Knows traces by rank. Must not know engines, or how a trace is made or stored.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable

from infinity.engine.trace_file import LANES, RankTrace, Slice, read_trace
from infinity.errors import UsageError
from infinity.output import give, table
from infinity.sizes import format_bytes
from infinity.system.events import COMPUTE, LINKS, STALL, STEP

WARM_UP_STEPS = 2  # the first step records the uses of ops, the second is the first that follows a plan
NUM_WAITS = 8  # number of waits in the list by name

Interval = tuple[float, float]


def trace(arguments) -> int:
    """The `trace` command."""
    ranks = read_trace(arguments.file)
    try:
        report = breakdown(ranks)
        text = _text(report)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{arguments.file} is a damaged trace: {type(error).__name__}: {error}") from error
    give(report, text, arguments.json)
    return 0


def breakdown(ranks: list[RankTrace], num_warm_up: int = WARM_UP_STEPS) -> dict:
    """Shares of the time and bytes per step for each rank, and their means; the value of --json.

    Counts the complete steps that all ranks have, without the first num_warm_up if there are more. A lane is busy while at least one event is active.
    A transfer across the first or last border counts by the share of its time inside. Raises UsageError if no step is complete.
    """
    numbers = _whole_steps(ranks, num_warm_up)
    each = [_of_rank(trace, numbers) for trace in ranks]
    lanes = {}
    for lane in (COMPUTE, *LINKS, STALL):
        rows = [rank["lanes"][lane] for rank in each]
        worst = max(range(len(rows)), key=lambda i: rows[i]["waited_share"])
        lanes[lane] = {key: statistics.fmean(row[key] for row in rows) for key in rows[0]}
        lanes[lane]["worst"] = {"rank": each[worst]["rank"], "waited_share": rows[worst]["waited_share"]}
    waits = defaultdict(float)
    for rank in each:
        for wait in rank["waits"]:
            waits[wait["link"], wait["name"]] += wait["seconds"] / len(each)
    seconds = [time for rank in each for time in rank["step_seconds"]]
    return {
        "world": len(ranks),
        "steps": [numbers[0], numbers[-1]],
        "num_left_out": sum(trace.num_left_out for trace in ranks),
        "step_seconds": {"median": statistics.median(seconds), "least": min(seconds), "most": max(seconds)},
        "lanes": lanes,
        "waits": _longest(waits, statistics.fmean(rank["seconds"] for rank in each)),
        "ranks": [rank | {"waits": rank["waits"][:NUM_WAITS]} for rank in each],
    }


def _whole_steps(ranks: list[RankTrace], num_warm_up: int) -> list[int]:
    """Numbers of the steps to count."""
    common = set.intersection(*({_number(step) for step in _steps(trace) if step.start >= trace.complete_since} for trace in ranks))
    if not common:
        raise UsageError("the trace contains no complete step: train for some steps, each with optimizer.step()")
    measured = [number for number in sorted(common) if number > num_warm_up]
    return measured or sorted(common)


def _steps(trace: RankTrace) -> list[Slice]:
    return [piece for piece in trace.slices if piece.lane == STEP]


def _number(step: Slice) -> int:
    return int(step.name.removeprefix("step "))


def _of_rank(trace: RankTrace, numbers: list[int]) -> dict:
    steps = [step for step in _steps(trace) if numbers[0] <= _number(step) <= numbers[-1]]
    begin, end = steps[0].start, steps[-1].end
    seconds = end - begin
    stalls = [piece for piece in trace.slices if piece.lane == STALL]
    lanes = {}
    for lane in (COMPUTE, *LINKS, STALL):
        pieces = [piece for piece in trace.slices if piece.lane == lane]
        waited = [piece for piece in stalls if lane in (piece.detail, STALL)]
        busy = _union((piece.start, piece.end) for piece in _clipped(pieces, begin, end))
        nbytes = sum(_share(piece, begin, end) * piece.nbytes for piece in pieces)
        lanes[lane] = {
            "busy_share": busy / seconds,
            "bytes_per_step": nbytes / len(numbers),
            "gbps": nbytes / busy / 1e9 if busy else 0.0,
            "waited_share": _union((piece.start, piece.end) for piece in _clipped(waited, begin, end)) / seconds,
        }
    waits = defaultdict(float)
    for piece in _clipped(stalls, begin, end):
        waits[piece.detail, piece.name] += piece.end - piece.start
    return {
        "rank": trace.rank,
        "seconds": seconds,
        "step_seconds": [step.end - step.start for step in steps],
        "lanes": lanes,
        "waits": _longest(waits, seconds, None),
    }


def _longest(waits: dict[tuple[str, str], float], seconds: float, count: int | None = NUM_WAITS) -> list[dict]:
    ordered = sorted(waits.items(), key=lambda item: (-item[1], item[0]))[:count]
    return [{"link": link, "name": name, "seconds": time, "share": time / seconds} for (link, name), time in ordered]


def _clipped(pieces: Iterable[Slice], begin: float, end: float) -> list[Slice]:
    """The parts of the pieces in [begin, end]."""
    inside = [piece for piece in pieces if piece.end > begin and piece.start < end]
    return [Slice(p.lane, p.name, max(p.start, begin), min(p.end, end), p.nbytes, p.detail) for p in inside]


def _share(piece: Slice, begin: float, end: float) -> float:
    """The share of a piece's time in [begin, end)."""
    if piece.end == piece.start:
        return float(begin <= piece.start < end)
    return max(0.0, min(piece.end, end) - max(piece.start, begin)) / (piece.end - piece.start)


def _union(intervals: Iterable[Interval]) -> float:
    """Seconds that at least one interval covers."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


# Output


def _text(report: dict) -> str:
    first, last = report["steps"]
    step, world = report["step_seconds"], report["world"]
    which = f"step {first}" if first == last else f"steps {first} to {last}"
    several = world > 1
    ranks = f"mean of {world} ranks" if several else "1 rank"
    lines = [f"{which}, {ranks}: {step['median']:.4f} s a step (median; {step['least']:.4f} to {step['most']:.4f})"]
    if report["num_left_out"]:
        lines.append(f"not in the trace: the {report['num_left_out']:,} oldest events, before the first of these steps")
    head = ["", "busy", "a step", "GB/s", "step waited"] + (["most"] if several else [])
    rows = []
    for lane in LANES:
        if lane not in report["lanes"]:
            continue
        row, worst = report["lanes"][lane], report["lanes"][lane]["worst"]
        moved = [format_bytes(round(row["bytes_per_step"])), f"{row['gbps']:.2f}"] if lane in LINKS else ["", ""]
        waited = [f"{row['waited_share']:.1%}"] if lane != COMPUTE else [""]
        if several:
            waited.append(f"{worst['waited_share']:.1%} (rank {worst['rank']})" if worst["waited_share"] else "")
        title, busy = ("all waits", "") if lane == STALL else (LANES[lane], f"{row['busy_share']:.1%}")
        rows.append([title, busy, *moved, *waited])
    lines += ["", table(head, rows)]
    if report["waits"]:
        num_steps = last - first + 1
        rows = [
            [f"{LANES[wait['link']]}: {wait['name']}", f"{wait['seconds'] / num_steps * 1e3:.2f} ms", f"{wait['share']:.1%}"]
            for wait in report["waits"]
        ]
        lines += ["", table(["waited for most", "a step", "of it"], rows)]
    return "\n".join(lines)
