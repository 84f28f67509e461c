"""A rank that is killed, or stopped for some seconds: the ranks that name it, the seconds until then, and the end of the run.

    python bench/lost_rank.py [--ranks 8] [--faults kill,stop] [--stopped 12] [--hidden 64] [--device cuda] [--limit 60] [--json FILE]

The ranks train a GPT without end. After some steps the last rank gets SIGKILL, or SIGSTOP, followed by SIGCONT after --stopped seconds. A rank
names the lost rank if it prints a line with "rank N". This line is an error, the line about a silent rank, or the line about a long step, which
may name further ranks. Seconds count from the signal. No launcher runs, because torchrun ends all ranks as soon as one ends. After a kill, the
bench waits for the end of the other ranks. After a stop, the bench waits until rank 0 has made three more steps, or all other ranks have ended.
A rank that is stopped for more than 20 s counts as lost. If no rank names the lost rank within 30 s, or the bench waits longer than --limit
after the signal, the exit status is 1.
"""

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

import _common
import torch
from _engines import join

import infinity
from infinity.errors import ConfigError
from infinity.model.gpt import GPT
from infinity.output import table, write_json
from infinity.system.failure_watch import REPORT_SILENCE_S

NAME_LIMIT_S = 30.0
FAULTS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
STEPS_BEFORE, START_LIMIT_S = 5, 600  # of the fault


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=_common.at_least(2), default=max(2, torch.cuda.device_count()))
    parser.add_argument("--faults", default="kill,stop")
    parser.add_argument("--stopped", type=_common.positive_float, default=12.0, help="seconds; a line about a silent rank comes after 5")
    for name, default in (("hidden", 64), ("layers", 4), ("seq", 64), ("batch", 2)):
        parser.add_argument(f"--{name}", type=_common.positive, default=default)
    parser.add_argument("--limit", type=_common.positive_float, default=60.0, help="seconds after the signal")
    _common.add_place(parser)
    options = _common.parse(parser, plots=False)
    if options.case:
        train(argparse.Namespace(**json.loads(options.case)))
        return 0
    faults = options.faults.split(",")
    if unknown := [fault for fault in faults if fault not in FAULTS]:
        raise ConfigError(f"--faults {unknown[0]!r}: expected {', '.join(FAULTS)}")
    if "stop" in faults and not REPORT_SILENCE_S + 2 <= options.stopped <= options.limit - 10:
        raise ConfigError(f"--stopped {options.stopped:g}: expected {REPORT_SILENCE_S + 2:g} s or more, and 10 s less than --limit")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # no rank stays stopped
    found = {fault: lose(options, fault) for fault in faults}
    rows = [
        [fault, str(options.ranks), f"{each['num_named']} of {options.ranks - 1}", seconds(each["first_s"]), seconds(each["last_s"]), each["end"]]
        for fault, each in found.items()
    ]
    print(table(["fault", "ranks", "ranks that name it", "first, s", "last, s", "end"], rows))
    for fault, each in found.items():
        print(f"{fault}: {each['line']}")
    if options.json:
        write_json(options.json, {"found": found, "options": _common.given(options), "torch": torch.__version__})
    return int(any(each["first_s"] is None or each["first_s"] > NAME_LIMIT_S or each["end"] == "nothing" for each in found.values()))


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


class Rank:
    """A rank's process. said: the lines that the process has printed, each with the time."""

    def __init__(self, case: dict, environment: dict):
        command = [sys.executable, __file__, "--case", json.dumps(case)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen(command, env={**os.environ, **environment}, **pipes)
        self.said: list[tuple[float, str]] = []
        self.num_steps = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            if line.startswith("step "):
                self.num_steps = int(line[5:])
            else:
                self.said.append((time.monotonic(), line.strip()))

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def first_line(self, pattern: str, since: float) -> tuple[float, str] | None:
        """The first line after a time in which the pattern is found, and the seconds since then."""
        return next(((at - since, line) for at, line in list(self.said) if at > since and re.search(pattern, line)), None)


def lose(options, fault: str) -> dict:
    """Train, lose the last rank, and watch the others."""
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="lost-") as folder, socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
        probe.close()
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(options.ranks), "OMP_NUM_THREADS": "1"}
        shared["LOCAL_WORLD_SIZE"] = shared["WORLD_SIZE"]
        case = _common.given(options) | {"directory": folder}
        ranks = []
        try:
            for rank in range(options.ranks):
                ranks.append(Rank(case, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}))
            return watch(options, fault, ranks)
        finally:
            for rank in ranks:
                rank.end()


def watch(options, fault: str, ranks: list[Rank]) -> dict:
    *others, lost = ranks
    wait_until(lambda: others[0].num_steps >= STEPS_BEFORE or any(rank.has_ended for rank in ranks), START_LIMIT_S)
    if (ended := next((rank for rank in ranks if rank.has_ended), None)) is not None:
        raise _common.RunError(f"a rank ended before the fault: {ended.said[-1][1] if ended.said else 'without a word'}")
    if others[0].num_steps < STEPS_BEFORE:
        raise _common.RunError(f"no {STEPS_BEFORE} steps in {START_LIMIT_S} s")
    lost.process.send_signal(FAULTS[fault])
    since, end = time.monotonic(), "nothing"
    all_ended = lambda: all(rank.has_ended for rank in others)
    if fault == "kill":
        end = "all others end" if wait_until(all_ended, options.limit) else end
    else:
        wait_until(all_ended, options.stopped)
        lost.process.send_signal(signal.SIGCONT)
        before = others[0].num_steps
        wait_until(lambda: all_ended() or others[0].num_steps >= before + 3, options.limit - options.stopped)
        end = "all others end" if all_ended() else "training goes on" if others[0].num_steps >= before + 3 else end
    time.sleep(1.0)  # the last lines arrive
    named = [line for rank in others if (line := rank.first_line(rf"\brank {len(others)}\b", since))]
    times = sorted(at for at, _ in named)
    line = min(named)[1] if named else "no rank names it"
    return {"num_named": len(named), "first_s": times[0] if times else None, "last_s": times[-1] if times else None, "end": end, "line": line}


def wait_until(condition: Callable[[], bool], limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def train(options) -> None:
    """In a rank: steps without end. Prints their number."""
    rank, cuda = int(os.environ["RANK"]), options.device == "cuda"
    device = join("infinity", options.device, "nccl" if cuda else "gloo")
    config = infinity.Config(swap_dirs=options.directory, device=options.device, dtype="bf16", verbose=False)
    with infinity.init(config):
        model = GPT(options.hidden, options.layers, 4, 512, options.seq)
    optimizer = infinity.AdamW(model.parameters())
    number = 0
    while True:
        tokens = torch.randint(512, (options.batch, options.seq + 1), generator=torch.Generator().manual_seed(rank)).to(device)
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        number += 1
        print(f"step {number}", flush=True)


if __name__ == "__main__":
    _common.exit_with(main)
