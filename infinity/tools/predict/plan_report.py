"""The output of `plan`: a prediction as text, and as the value of --json.

Knows predictions and machines. Must not know how a prediction is made.
"""

from __future__ import annotations

import dataclasses
import math

from infinity.output import table
from infinity.plan.tiers import DEVICE, HOST, NVME
from infinity.sizes import format_bytes
from infinity.system.events import COMPUTE, LINKS
from infinity.tools.machine import Machine
from infinity.tools.meta_models import Subject
from infinity.tools.predict.largest_model import Largest
from infinity.tools.predict.prediction import Prediction

TITLES = {COMPUTE: "device compute"} | {link: link for link in LINKS}
DAY_SECONDS = 86400


def plan_report(prediction: Prediction, largest: Largest | None) -> dict:
    """The value of --json."""
    machine, uses = prediction.machine, prediction.uses
    num = prediction.layout.num_parameters
    nums = {link: num if link in ("all_gather", "reduce_scatter") else num / machine.world for link in TITLES}  # others: a rank's share
    written = uses["nvme_write"].nbytes * machine.world / prediction.step_seconds * DAY_SECONDS
    endurance = machine.total("endurance") * machine.nodes
    return {
        "fits": True,
        "num_parameters": prediction.layout.num_parameters,
        "num_chunks": len(prediction.layout.chunks),
        "chunk_bytes": max(chunk.nbytes for chunk in prediction.layout.chunks),
        "world": machine.world,
        "compresses_nvme": prediction.compresses_nvme,
        "memory": {tier.name: dataclasses.asdict(need) for tier, need in prediction.memory.items()},
        "links": {
            link: {
                "bytes_per_step": uses[link].nbytes,
                "bytes_per_parameter": uses[link].nbytes / nums[link],
                "busy_seconds": uses[link].busy_seconds,
                "stall_seconds": uses[link].stall_seconds,
            }
            for link in TITLES
        },
        "step_seconds": prediction.step_seconds,
        "compute_seconds": prediction.compute_seconds,
        "tokens_per_second": prediction.tokens * machine.world / prediction.step_seconds,
        "bottleneck": prediction.bottleneck,
        "hiding_tokens": prediction.hiding_tokens,
        "hiding_tokens_in_turn": prediction.hiding_tokens_in_turn if math.isfinite(prediction.hiding_tokens_in_turn) else None,
        "largest_parameters": largest and largest.parameters,
        "unsure": machine.unsure_names,
        "written_bytes_per_day": written,
        "endurance_days": endurance / written if written and endurance else None,
    }


def plan_text(subject: Subject, prediction: Prediction, report: dict, largest: Largest | None) -> str:
    machine, links = prediction.machine, report["links"]

    names = {DEVICE: "device, each", HOST: "pinned host, per node", NVME: "drives, per node"}
    if machine.device == "cpu":
        names |= {DEVICE: "of it, each device", HOST: "memory, per node"}
    memory = []
    for tier in (HOST, DEVICE, NVME) if machine.device == "cpu" else names:
        need = prediction.memory[tier]
        there = "unknown" if need.there is None else format_bytes(need.there) if need.there else "-"
        memory.append([names[tier], format_bytes(need.needed), there])
    rows = [
        [
            name,
            format_bytes(links[link]["bytes_per_step"]) if links[link]["bytes_per_step"] else "-",
            f"{links[link]['bytes_per_parameter']:.2f}" if links[link]["bytes_per_step"] else "-",
            f"{links[link]['busy_seconds']:.3f}",
            _percent(links[link]["busy_seconds"] / report["step_seconds"]),
            _percent(links[link]["stall_seconds"] / report["step_seconds"]),
        ]
        for link, name in TITLES.items()
    ]
    share = report["compute_seconds"] / report["step_seconds"]
    lines = [
        f"model     {subject.title}",
        f"machine   {machine_title(machine)}",
        f"chunks    {report['num_chunks']:,} of at most {format_bytes(report['chunk_bytes'])}, each sharded over {machine.world} rank(s)"
        f"{_compressed(prediction)}",
        "",
        table(["memory", "needed", "available"], memory),
        "",
        table(["step of a rank", "bytes", "per parameter", "seconds", "busy", "waited for"], rows),
        "",
        f"step      {report['step_seconds']:.3g} s predicted, {report['tokens_per_second']:,.0f} tokens/s; longest: "
        f"{TITLES[report['bottleneck']]}; floating-point operations alone {report['compute_seconds']:.3g} s ({_percent(share)})",
        f"tokens    {when_hidden(prediction)}",
    ]
    if largest:
        lines.append(f"largest   a GPT of {largest} parameters fits this machine")
    if report["unsure"]:
        lines.append(f"unsure    these figures of the machine differed between the rounds of calibrate: {', '.join(report['unsure'])}")
    if report["written_bytes_per_day"]:
        worn = f"; the drives' endurance lasts {report['endurance_days']:,.0f} days" if report["endurance_days"] else ""
        lines.append(f"wear      {report['written_bytes_per_day'] / 1e12:,.1f} TB written per day{worn}")
    return "\n".join(lines)


def _compressed(prediction: Prediction) -> str:
    """The assumption about the sizes of compressed records."""
    if not prediction.compresses_nvme:
        return ""
    placement = prediction.placement
    share = placement.nvme_nbytes / max(1, placement.uncoded().nvme_nbytes)
    return f", compressed on NVMe to {share:.0%} of the bytes, if exponents of weights and states vary as in most trainings"


def when_hidden(prediction: Prediction) -> str:
    """The number of tokens per step that hides all transfers, by layer and with micro-batches one after the other, in words."""
    now, by_layer, in_turn = prediction.tokens, prediction.hiding_tokens, prediction.hiding_tokens_in_turn
    if not by_layer:
        return "the step has no transfers to hide"
    text = f"compute hides every transfer from {by_layer:,.0f} tokens per step and device on (now {now:,})"
    if by_layer > now:
        loop = f"from {in_turn:,.0f} tokens on" if math.isfinite(in_turn) else "with no number of tokens"
        text += f", in micro-batches of {now:,} with infinity.accumulate; with micro-batches one after the other, {loop}"
    return text


def machine_title(machine: Machine) -> str:
    nodes = "" if machine.nodes == 1 else f"{machine.nodes} nodes, each "
    return f"{machine.name + ': ' if machine.name else ''}{nodes}{machine.devices} device(s), {len(machine.drives)} drive(s)"


def _percent(share: float) -> str:
    """A share in percent. 0% means exactly zero."""
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"
