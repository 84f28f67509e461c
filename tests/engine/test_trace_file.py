"""Traces: the events of a run, the file for Perfetto, and the table of shares. Times of real runs are compared only for their order.

Long because events, file and table are tested on the same traced runs.
"""

import json

import pytest
import torch
from support.helpers import NVME, on_gpu, start_python, training
from support.models import tiny_gpt

import infinity
from infinity.engine.autograd.ops import ops_of
from infinity.engine.trace_file import LANES, RankTrace, Slice, joined, read_trace, save_trace, to_perfetto, write_trace
from infinity.errors import UsageError
from infinity.system.events import COMPUTE, LINKS, STALL, STEP, Event, Events
from infinity.system.timeline import CudaTimeline, Timeline
from infinity.tools.cli import main
from infinity.tools.measure.breakdown import breakdown

STEPS = 4
PHASES = ["forward", "recompute", "backward"]


def run_steps(model, optimizer, steps):
    for step in range(steps):
        x = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(step))
        model(x, x).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """A run with recomputation and all records on NVMe: (trace of the rank, JSON of the file, chunks of each op, slots of each kind)."""
    folder = tmp_path_factory.mktemp("traced")
    with training(lambda: tiny_gpt(checkpoint_activations=True), folder / "swap", trace=True, **NVME) as (model, engine, optimizer):
        run_steps(model, optimizer, STEPS)
        save_trace(folder / "trace.json", model)
        spans = {op.name: op.spans for _, op in ops_of(model, engine.registry)}
        chunks = {name: [engine.registry.chunks[i].title for span in found for i in span.span.chunks] for name, found in spans.items()}
        slots = {kind: cache.slots.count for kind, cache in engine.records.caches.items()}
    return read_trace(folder / "trace.json")[0], json.loads((folder / "trace.json").read_text()), chunks, slots


def of(trace, lane):
    return [piece for piece in trace.slices if piece.lane == lane]


# Events of a run


def test_a_trace_of_one_rank_has_every_lane(traced):
    trace, value, _, _ = traced
    assert {piece.lane for piece in trace.slices} >= {STEP, COMPUTE, STALL, "nvme_read", "h2d", "d2h", "update", "nvme_write"}
    assert not of(trace, "all_gather") and not of(trace, "reduce_scatter")
    names = {event["args"]["name"] for event in value["traceEvents"] if event["name"] == "thread_name"}
    assert names >= {"steps", "device compute", "nvme_read", "nvme_write", "h2d", "update"}
    assert trace.num_left_out == 0


def test_each_step_begins_at_the_end_of_the_step_before(traced):
    steps = of(traced[0], STEP)
    assert [step.name for step in steps] == [f"step {number}" for number in range(1, STEPS + 1)]
    assert all(before.end == after.start for before, after in zip(steps, steps[1:]))


def test_one_op_computes_at_a_time(traced):
    compute = of(traced[0], COMPUTE)
    assert all(before.end <= after.start for before, after in zip(compute, compute[1:]))


def test_no_op_computes_while_the_training_thread_waits(traced):
    trace = traced[0]
    for stall in of(trace, STALL):
        assert not [piece for piece in of(trace, COMPUTE) if piece.start < stall.end and stall.start < piece.end], stall


def test_an_op_computes_forward_then_recompute_then_backward(traced):
    trace = traced[0]
    last = of(trace, STEP)[-1]
    inside = [piece for piece in of(trace, COMPUTE) if last.start <= piece.start < last.end]
    for name in ("blocks.0.attention.qkv", "blocks.1.mlp.0"):
        assert list(dict.fromkeys(piece.detail for piece in inside if piece.name == name)) == PHASES
    first = {(piece.name, piece.detail): piece.start for piece in reversed(inside)}
    assert first["blocks.0.attention.qkv", "forward"] < first["blocks.1.attention.qkv", "forward"]
    assert first["blocks.1.attention.qkv", "backward"] < first["blocks.0.attention.qkv", "backward"]


def test_a_chunk_is_read_then_copied_then_used(traced):
    trace, _, chunks, _ = traced
    reads = {f"{title} weights": title for titles in chunks.values() for title in titles}
    ready, copied = {}, {}  # when each chunk's weights were last in host memory, and on the device
    # A separate thread notes the end of a read, maybe after the copy that waited for its bytes has begun. So the start of the read counts.
    order = sorted(trace.slices, key=lambda piece: piece.start if piece.lane in (COMPUTE, "nvme_read") else piece.end)
    num_copies = num_ops = 0
    begin = of(trace, STEP)[1].start  # before step 2, initial values may still be in host memory
    for piece in order:
        if piece.lane == "nvme_read" and piece.name in reads:
            ready[reads[piece.name]] = piece.start
        elif piece.lane == "update":
            ready[piece.name] = piece.end
        elif piece.lane == "h2d":
            assert piece.start < begin or ready[piece.name] <= piece.start, piece
            copied[piece.name] = piece.end
            num_copies += piece.start >= begin
        elif piece.lane == COMPUTE and piece.detail != "backward":
            for title in chunks[piece.name]:
                assert copied[title] <= piece.start, (piece, title)
                num_ops += 1
    assert num_copies > (STEPS - 1) * len(reads) and num_ops > 2 * STEPS * len(reads)


def test_a_record_is_updated_before_it_is_written(traced):
    trace = traced[0]
    updated = {}
    for piece in sorted(trace.slices, key=lambda piece: (piece.end if piece.lane == "update" else piece.start)):
        if piece.lane == "update":
            updated[piece.name] = piece.end
        elif piece.lane == "nvme_write" and piece.start > of(trace, STEP)[0].end:  # earlier writes are the initial values
            assert updated[piece.name.rsplit(" ", 1)[0]] <= piece.start


def test_the_trace_has_the_bytes_and_waits_of_the_meters(tmp_path):
    with training(tiny_gpt, tmp_path / "swap", trace=True, **NVME) as (model, engine, optimizer):
        run_steps(model, optimizer, 2)
        engine.flush()
        stats = engine.stats()["links"]
        for link in LINKS:
            assert sum(event.nbytes for event in engine.events.trace if event.lane == link) == stats[link]["nbytes"]
            waited = sum(e.end - e.start for e in engine.events.trace if e.lane == STALL and e.what[0] == link)
            assert waited == pytest.approx(stats[link]["stall_seconds"])


def test_without_tracing_there_are_no_events(tmp_path):
    with training(tiny_gpt, tmp_path / "swap", **NVME) as (model, engine, optimizer):
        run_steps(model, optimizer, 2)
        assert not engine.events.trace and engine.events.timeline is None
        with pytest.raises(UsageError, match=r"infinity.Config\(trace=True\)"):
            save_trace(tmp_path / "trace.json", model)


def test_save_trace_before_any_event_is_refused(tmp_path):
    with training(tiny_gpt, tmp_path / "swap", trace=True, **NVME) as (model, engine, optimizer):
        engine.events._trace.clear()
        with pytest.raises(UsageError, match="nothing has run yet"):
            save_trace(tmp_path / "trace.json", model)


def test_an_op_ends_when_the_next_begins_and_pauses_during_waits(monkeypatch):
    events = Events(tracing=True)
    events.timeline = timeline = Timeline(events)
    clock = iter([1.0, 2.0, 5.0])
    monkeypatch.setattr("infinity.system.timeline.now", lambda: next(clock))
    timeline.begin("forward", "outer")
    timeline.begin("forward", "inner")
    events.stalled("nvme_read", 7, 3.0, 4.0)
    timeline.end()
    timeline.end()
    assert [event for event in events.trace if event.lane == COMPUTE] == [
        Event(COMPUTE, ("forward", "outer"), 1.0, 2.0),
        Event(COMPUTE, ("forward", "inner"), 2.0, 3.0),
        Event(COMPUTE, ("forward", "inner"), 4.0, 5.0),
    ]
    assert events.meters["nvme_read"].stall_seconds == 1.0


class ScriptedEvent:
    """A timing event of a device that runs behind the host. `clock` is [host time, device time of the queue's end, device time reached]."""

    clock = [0.0, 0.0, 0.0]

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        self.at = self.clock[1]  # device time at which the device reaches the event

    def query(self):
        return self.at <= self.clock[2]

    def synchronize(self):
        self.clock[2] = max(self.clock[2], self.at)

    def elapsed_time(self, later):
        assert self.query() and later.query()
        return (later.at - self.at) * 1e3


@pytest.fixture
def device(monkeypatch):
    """(clock, events) with the timeline of a CUDA device. The device clock is 1000.0 when the host clock is 50.0."""
    clock = ScriptedEvent.clock = [50.0, 1000.0, 1000.0]
    monkeypatch.setattr("torch.cuda.Event", ScriptedEvent)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: None)
    for module in ("timeline", "events"):
        monkeypatch.setattr(f"infinity.system.{module}.now", lambda: clock[0])
    events = Events(tracing=True)
    events.timeline = CudaTimeline(events, torch.device("cuda"))
    return clock, events


def test_a_cuda_op_is_reported_after_the_device_has_passed_it(device):
    clock, events = device
    clock[:2] = 50.1, 1001.0
    events.timeline.begin("forward", "a")
    clock[:2] = 50.2, 1003.0  # the thread runs ahead of the device
    events.timeline.begin("forward", "b")
    clock[:2] = 50.3, 1004.5
    events.timeline.end()
    events.step_done()
    assert [event.lane for event in events.trace] == [STEP]  # the device has passed no event, and step_done() does not wait
    clock[0], clock[2] = 53.5, 1003.2
    events.step_done()
    assert [event for event in events.trace if event.lane == COMPUTE] == [Event(COMPUTE, ("forward", "a"), 51.0, 53.0)]
    clock[0] = 60.0
    events.timeline.resolve(wait=True)
    assert events.trace[-1] == Event(COMPUTE, ("forward", "b"), 53.0, 54.5)


def test_transfers_and_waits_of_a_cuda_device_have_device_times(device):
    clock, events = device
    first = events.device_mark()
    clock[:2] = 50.1, 1002.0
    events.moved("h2d", 7, 100, 50.0, 50.1, (first, events.device_mark()))
    since = events.device_mark()
    clock[:2] = 50.2, 1002.25
    events.device_waited("h2d", 7, since)
    clock[0] = 60.0
    events.timeline.resolve(wait=True)
    assert events.trace == [Event("h2d", 7, 50.0, 52.0, 100), Event(STALL, ("h2d", 7), 52.0, 52.25)]
    assert events.meters["h2d"].busy_seconds == pytest.approx(0.1)  # the meters are the same without a trace


def test_a_clock_drift_between_host_and_device_is_corrected(device):
    clock, events = device
    clock[:] = 5050.0, 5999.0, 5999.0  # the device clock is a second behind
    events.timeline.begin("forward", "a")
    clock[:] = 5051.0, 6000.0, 6000.0
    events.timeline.end()
    events.timeline.resolve()
    assert events.trace == [Event(COMPUTE, ("forward", "a"), 5050.0, 5051.0)]
    clock[:] = 5052.0, 6009.0, 6009.0  # the device clock jumps eight seconds ahead
    events.timeline.begin("forward", "b")
    events.timeline.end()
    events.timeline.resolve()
    assert events.trace[-1] == Event(COMPUTE, ("forward", "b"), 5052.0, 5052.0)


def test_a_delayed_thread_does_not_make_ops_overlap(device):
    """The first mark is noted two seconds late. The marks of a transfer, which cannot be in the future, correct the time."""
    clock, events = device
    clock[:2] = 53.0, 1001.0
    events.timeline.begin("forward", "a")
    clock[1] = 1003.0
    events.timeline.begin("forward", "b")
    clock[1] = 1003.2
    first = events.device_mark()
    clock[1] = 1003.4
    events.moved("h2d", 7, 100, 53.0, 53.0, (first, events.device_mark()))
    events.timeline.end()
    clock[0] = 53.5
    events.timeline.resolve(wait=True)
    a, b = (event for event in events.trace if event.lane == COMPUTE)
    assert a.start <= a.end <= b.start <= b.end


@on_gpu
@pytest.mark.parametrize("weights", ["nvme", "host"])
def test_a_cuda_run_has_all_lanes(tmp_path, weights):
    places = {"param_tier": weights, "optimizer_state_tier": weights, "residency": "none", "device": "cuda"}
    with training(tiny_gpt, tmp_path / "swap", trace=True, **places) as (model, engine, optimizer):
        for step in range(4):
            x = torch.randint(61, (2, 12), device="cuda")
            model(x, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        save_trace(tmp_path / "trace.json", model)
    [trace] = read_trace(tmp_path / "trace.json")
    assert {piece.lane for piece in trace.slices} >= {STEP, COMPUTE, STALL, "h2d", "d2h", "update"}
    compute = of(trace, COMPUTE)
    assert all(before.end <= after.start + 1e-4 for before, after in zip(compute, compute[1:]))
    assert sum(piece.nbytes for piece in of(trace, "h2d")) > 0
    assert 0 < breakdown([trace])["lanes"][COMPUTE]["busy_share"] <= 1


def test_above_max_events_the_oldest_events_are_dropped():
    events = Events(tracing=True, max_events=3)
    for number in range(5):
        events.mark("nvme_read", number, number, number + 1.5)
    assert [event.what for event in events.trace] == [2, 3, 4]
    assert (events.num_left_out, events.complete_since) == (2, 2.5)


def test_a_long_trace_keeps_its_last_steps(tmp_path, capsys):
    with training(tiny_gpt, tmp_path / "swap", trace=True, chunk_mib=1 / 64, **NVME) as (model, engine, optimizer):
        engine.events.max_events = 500
        run_steps(model, optimizer, 6)
        save_trace(tmp_path / "trace.json", model)
        assert len(engine.events.trace) == 500
    [trace] = read_trace(tmp_path / "trace.json")
    assert 0 < trace.num_left_out <= engine.events.num_left_out  # reads of the next step may add events meanwhile
    report = breakdown([trace])
    first, last = report["steps"]
    assert 1 < first <= last == 6
    assert of(trace, STEP)[-(last - first + 1)].start >= trace.complete_since
    assert main(["trace", str(tmp_path / "trace.json")]) == 0
    assert f"not in the trace: the {trace.num_left_out:,} oldest events" in capsys.readouterr().out


@pytest.mark.long
def test_the_traces_of_all_ranks_are_in_one_file(tmp_path):
    source = """
        import sys, torch, torch.distributed as dist
        sys.path.insert(0, sys.argv[3])
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=int(sys.argv[2]), world_size=2)
        import infinity
        from pathlib import Path
        from support.helpers import NVME, training
        from support.models import tiny_gpt
        from test_trace_file import run_steps
        folder = Path(sys.argv[1])
        with training(tiny_gpt, folder / "swap", trace=True, chunk_mib=1 / 64, **NVME) as (model, engine, optimizer):
            run_steps(model, optimizer, 3)
            infinity.save_trace(folder / "trace.json", model)
    """
    (tmp_path / "swap").mkdir()
    processes = [start_python(source, tmp_path, rank, __file__.rpartition("/")[0]) for rank in range(2)]
    for process in processes:
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors
    ranks = read_trace(tmp_path / "trace.json")
    assert [trace.rank for trace in ranks] == [0, 1]
    names = {e["args"]["name"] for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["name"] == "process_name"}
    assert names == {"rank 0", "rank 1"}
    gathers = [of(trace, "all_gather") for trace in ranks]
    count = min(map(len, gathers))  # one rank may have begun gathers of the next step
    assert [piece.name for piece in gathers[0][:count]] == [piece.name for piece in gathers[1][:count]] and count > 20
    for mine, other in zip(*gathers):  # on one clock, no rank's gather ends before the other rank's gather begins
        assert mine.start < other.end and other.start < mine.end
    for trace in ranks:
        assert of(trace, "reduce_scatter") and of(trace, COMPUTE)
        copies = {}
        for piece in sorted(trace.slices, key=lambda piece: piece.end if piece.lane == "h2d" else piece.start):
            if piece.lane == "h2d":
                copies[piece.name] = piece.end
            elif piece.lane == "all_gather":
                assert copies[piece.name] <= piece.start, "expected the gather of a chunk after the copy of its shard"
    report = breakdown(ranks)
    assert report["world"] == 2 and report["lanes"]["all_gather"]["bytes_per_step"] > 0
    assert main(["trace", str(tmp_path / "trace.json")]) == 0


# The file


def test_the_file_has_the_format_that_perfetto_reads(traced):
    value = traced[1]
    events = value["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    stamps = [event["ts"] for event in events if event["ph"] != "M"]
    assert stamps == sorted(stamps) and stamps[0] == 0
    threads = {}
    for event in events:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and isinstance(event["name"], str)
        if event["ph"] == "X":
            assert event["dur"] >= 0 and isinstance(event["ts"], (int, float))
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
        if event["ph"] == "C":
            assert event["args"] and all(isinstance(number, (int, float)) for number in event["args"].values())
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert named == set(threads)
    assert named == {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_sort_index"}
    for pieces in threads.values():  # Perfetto does not draw overlapping slices of a thread
        for before, after in zip(pieces, pieces[1:]):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-6


def test_counters_stay_within_their_bounds(traced):
    _, value, _, slots = traced
    counters = {}
    for event in value["traceEvents"]:
        if event["ph"] == "C":
            counters.setdefault(event["name"], []).append(event["args"])
    assert set(counters) == {"slots in use", "bytes queued", "GB/s"}
    for counts in counters["slots in use"]:
        assert all(0 <= counts[kind] <= slots[kind] for kind in counts) and counts.keys() == slots.keys()
    assert any(counts["states"] for counts in counters["slots in use"])
    for name in ("bytes queued", "GB/s"):
        assert all(number >= 0 for args in counters[name] for number in args.values())
        assert counters[name][-1] == {"read": 0, "written": 0}
        assert any(args["read"] for args in counters[name]) and any(args["written"] for args in counters[name])


def test_rates_and_queued_bytes_agree_with_a_hand_calculation():
    slices = [Slice("nvme_read", "a", 0.0, 2.0, 4_000_000_000), Slice("nvme_read", "b", 1.0, 2.0, 1_000_000_000), Slice("nvme_write", "c", 1.0, 3.0, 6_000_000_000)]
    events = to_perfetto([RankTrace(0, slices)])["traceEvents"]
    found = {name: [(e["ts"], e["args"]) for e in events if e["ph"] == "C" and e["name"] == name] for name in ("GB/s", "bytes queued")}
    assert found == {
        "GB/s": [
            (0.0, {"read": 2.0, "written": 0.0}),
            (1e6, {"read": 3.0, "written": 3.0}),
            (2e6, {"read": 0.0, "written": 3.0}),
            (3e6, {"read": 0.0, "written": 0.0}),
        ],
        "bytes queued": [
            (0.0, {"read": 4_000_000_000, "written": 0}),
            (1e6, {"read": 5_000_000_000, "written": 6_000_000_000}),
            (2e6, {"read": 0, "written": 6_000_000_000}),
            (3e6, {"read": 0, "written": 0}),
        ],
    }
    rows = [e["tid"] for e in events if e["ph"] == "X" and e["cat"] == "nvme_read"]
    titles = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [titles[tid] for tid in rows] == ["nvme_read", "nvme_read 2"]


def test_reading_a_trace_returns_the_written_trace(tmp_path, traced):
    ranks = [
        RankTrace(0, [Slice(STEP, "step 1", 0.0, 1.0), Slice(COMPUTE, "a.b", 0.1, 0.123456789, 0, "forward")], [(0.5, {"weights": 2})]),
        RankTrace(1, [Slice("nvme_read", "chunk 0 (a) weights", 0.2, 0.4, 4096), Slice(STALL, "chunk 0 (a)", 0.2, 0.3, 0, "nvme_read")], [], 7, 0.1),
    ]
    write_trace(tmp_path / "trace.json", ranks)
    assert read_trace(tmp_path / "trace.json") == ranks
    write_trace(tmp_path / "again.json", [traced[0]])
    assert read_trace(tmp_path / "again.json") == [traced[0]]


def noted(machine, wall_offset, *events, **options):
    return {"machine": machine, "wall_offset": wall_offset, "num_left_out": 0, "complete_since": 0.0, "samples": []} | options | {"events": events}


def test_clocks_of_other_machines_are_shifted_to_one_clock():
    def event(start):
        return ["nvme_read", "x", start, start + 1.0, 8, ""]

    ranks = joined(
        [
            noted("a", 1000.0, event(50.0), samples=[(50.5, {"weights": 1})]),
            noted("a", 1000.7, event(50.25)),  # the same machine has the same clock, in spite of the wall clock
            noted("b", 900.0, event(150.5), num_left_out=3, complete_since=150.75),
        ]
    )
    assert [trace.slices[0].start for trace in ranks] == [0.0, 0.25, 0.5]
    assert ranks[0].samples == [(0.5, {"weights": 1})]
    assert [(trace.num_left_out, trace.complete_since) for trace in ranks] == [(0, 0.0), (0, 0.0), (3, 0.75)]


# The table


def literal(rank=0, *, waited=0.25):
    """Four steps of one second. The table counts the last two."""
    steps = [Slice(STEP, f"step {number}", number - 1.0, float(number)) for number in range(1, 5)]
    return RankTrace(
        rank,
        [
            *steps,
            Slice(COMPUTE, "first", 0.0, 2.0, 0, "forward"),  # in warm-up steps
            Slice(COMPUTE, "first", 2.0, 2.5, 0, "forward"),
            Slice(COMPUTE, "last", 3.0, 4.0, 0, "backward"),
            Slice("nvme_read", "chunk 0 (a) weights", 1.5, 2.5, 2_000_000_000),  # half of this read is before the counted steps
            Slice("nvme_read", "chunk 1 (b) weights", 2.25, 2.75, 1_000_000_000),
            Slice("nvme_write", "chunk 0 (a) states", 3.5, 4.5, 1_000_000_000),  # half of this write is after the counted steps
            Slice(STALL, "chunk 1 (b)", 2.5, 2.5 + waited, 0, "nvme_read"),
            Slice(STALL, "chunk 0 (a)", 1.75, 2.125, 0, "nvme_read"),
            Slice(STALL, "chunk 0 (a)", 2.875, 3.0, 0, "h2d"),
        ],
    )


def test_shares_agree_with_a_hand_calculation():
    report = breakdown([literal()])
    lanes = report["lanes"]
    assert (report["world"], report["steps"]) == (1, [3, 4])
    assert report["step_seconds"] == {"median": 1.0, "least": 1.0, "most": 1.0}
    assert lanes[COMPUTE]["busy_share"] == 0.75
    assert lanes["nvme_read"]["busy_share"] == 0.375  # 2.0 to 2.75
    assert lanes["nvme_read"]["bytes_per_step"] == 1_000_000_000
    assert lanes["nvme_read"]["gbps"] == pytest.approx(2.0 / 0.75)
    assert lanes["nvme_read"]["waited_share"] == 0.1875  # 2.0 to 2.125, 2.5 to 2.75
    assert lanes["nvme_write"] | {"worst": None} == {
        "busy_share": 0.25, "bytes_per_step": 250_000_000, "gbps": 1.0, "waited_share": 0.0, "worst": None,
    }  # fmt: skip
    assert (lanes["h2d"]["waited_share"], lanes[STALL]["waited_share"]) == (0.0625, 0.25)
    assert [(wait["link"], wait["name"], wait["seconds"]) for wait in report["waits"]] == [
        ("nvme_read", "chunk 1 (b)", 0.25),
        ("h2d", "chunk 0 (a)", 0.125),
        ("nvme_read", "chunk 0 (a)", 0.125),
    ]


def test_the_table_shows_the_mean_and_the_worst_rank(tmp_path, capsys):
    ranks = [literal(0), literal(1, waited=0.375)]
    lanes = breakdown(ranks)["lanes"]
    assert lanes["nvme_read"]["waited_share"] == (0.1875 + 0.25) / 2
    assert lanes["nvme_read"]["worst"] == {"rank": 1, "waited_share": 0.25}
    write_trace(tmp_path / "trace.json", ranks)
    assert main(["trace", str(tmp_path / "trace.json"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [rank["lanes"]["nvme_read"]["waited_share"] for rank in report["ranks"]] == [0.1875, 0.25]
    assert main(["trace", str(tmp_path / "trace.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "steps 3 to 4, mean of 2 ranks: 1.0000 s a step (median; 1.0000 to 1.0000)"
    [row] = [line.split() for line in lines if line.startswith("nvme_read ")]
    assert row[1:] == ["37.5%", "953.7", "MiB", "2.67", "21.9%", "25.0%", "(rank", "1)"]
    assert [line for line in lines if line.startswith("nvme_read: chunk 1 (b) ")][0].split()[-3:] == ["156.25", "ms", "15.6%"]


def test_a_short_trace_counts_its_warm_up_steps():
    trace = literal()
    trace.slices = trace.slices[:2]
    assert breakdown([trace])["steps"] == [1, 2]


# Errors


@pytest.mark.parametrize(
    "text, expected",
    [
        (None, "cannot be read: No such file or directory"),
        ("", "is no trace, or is cut off"),
        ('{"traceEvents": [', "is no trace, or is cut off"),
        ("\x00\xff", "is no trace, or is cut off"),
        ("[1, 2]", "is not a trace of this engine"),
        ('{"traceEvents": [{"ph": "X", "ts": 1}]}', "is not a trace of this engine"),
        ('{"otherData": {"infinity": 99}}', "is a trace of format 99, expected 1"),
        ('{"otherData": {"infinity": 1, "ranks": 5}}', "is a damaged trace"),
        ('{"otherData": {"infinity": 1, "ranks": []}, "traceEvents": []}', "is a damaged trace"),
        ('{"otherData": {"infinity": 1, "ranks": []}, "traceEvents": [{"pid": 0}]}', "is a damaged trace"),
        (json.dumps(to_perfetto([RankTrace(0, [])])), "contains no complete step"),
    ],
)
def test_a_file_that_is_not_a_trace_is_a_one_line_error(tmp_path, capsys, text, expected):
    path = tmp_path / "trace.json"
    if text is not None:
        path.write_text(text, encoding="latin-1")
    assert main(["trace", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("infinity: error: ") and err.count("\n") == 1
    assert expected in err


def test_lanes_have_a_fixed_order():
    assert list(LANES) == [STEP, COMPUTE, STALL, "all_gather", "h2d", "nvme_read", "update", "reduce_scatter", "d2h", "nvme_write"]
    assert set(LINKS) < set(LANES)
    assert infinity.save_trace is save_trace
