"""The `plan` command: whether a model fits a machine, the time of a step, and the waits in the step.

Knows predictions and their output. Must not know how a prediction is made, or the spelling of options.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from infinity import config_files
from infinity.config import Config, command_layers
from infinity.errors import BudgetError, ConfigError, UsageError
from infinity.formats.dtypes import TORCH_DTYPES
from infinity.formats.format import DTYPE_NBYTES, STORAGES, Format
from infinity.model.gpt import GPT
from infinity.model.tiling import tile_limits, tile_to_fit
from infinity.output import check_file, check_plot, give, pyplot, table
from infinity.plan.record import record_layout
from infinity.plan.tiers import DEVICE, HOST, NVME
from infinity.sizes import format_bytes
from infinity.system.events import COMPUTE, LINKS
from infinity.tools.predict import formulas
from infinity.tools.predict.machine import Machine
from infinity.tools.predict.prediction import Prediction, arrangement, auto_device_nbytes, predict
from infinity.tools.predict.workload import Workload, workload
from infinity.tools.progress import Progress

TITLES = {COMPUTE: "device compute"} | {link: link for link in LINKS}
DAY_SECONDS = 86400
# Sizes in the search for the largest model: from 10^6 to about 3 * 10^16 parameters.
LEAST_PARAMETERS, LARGEST_STEP, NUM_STEPS = 1e6, 2**0.25, 140
COARSE_CHUNKS = 4000
MOST_TENSORS = 25_000  # of a model with tiles: layout, run and simulation then take about a minute
COARSEST_SHARE = 16  # a chunk takes at most 1/16 of a device, because several must fit at once


@dataclass(frozen=True)
class Subject:
    """A model on the meta device. run: runs a forward pass over the batch of one device, with `tokens` tokens."""

    title: str
    model: nn.Module
    run: Callable[[], object]
    tokens: int


def plan(arguments) -> int:
    """The `plan` command. If the model does not fit, the exit status is 1 and the output names the missing memory."""
    check_file(arguments.output, "--output")
    check_plot(arguments.plot, "--plot")
    machine = _machine(arguments)
    if arguments.plot is not None:
        plot_efficiency(machine, arguments.plot)
    # The defaults of `infinity train`.
    default = ("default", {"dtype": "bf16" if machine.device == "cuda" else "fp32"})
    config = Config.layered([default, *command_layers(arguments)])
    with few_tensors():
        subject = _subject(arguments, config)
    largest = None
    try:
        with Progress() as progress:
            say = functools.partial(progress.show, last=True) if progress.live else lambda text: None
            num = sum(param.numel() for param in subject.model.parameters())
            with contextlib.suppress(BudgetError):  # require_place raises it again below, once the largest model is known
                require_place(num, machine, config)
                cut_to_fit(subject.model, machine, config)
            if not arguments.model:
                largest = largest_parameters(machine, config, arguments, say)
            require_place(num, machine, config)
            say(f"{subject.title}: recording the ops")
            load = _workload(subject, recompute=not arguments.keep_activations)
            say("simulating some steps")
            prediction = predict(subject.model, load, machine, config)
    except BudgetError as error:
        text = f"{subject.title}\ndoes not fit {_title(machine)}: {error}"
        if largest:
            text += f"\nthe largest GPT that fits has {largest} parameters"
        give({"fits": False, "short": str(error), "largest_parameters": largest and largest.parameters}, text, arguments.json, arguments.output)
        return 1
    report = _report(prediction, largest)
    give(report, _text(subject, prediction, report, largest), arguments.json, arguments.output)
    return 0


def gpt(hidden: int, layers: int, heads: int, vocab: int, seq: int, batch: int, dtype: str) -> Subject:
    """A GPT with these sizes. batch: sequences per device."""
    try:
        with torch.device("meta"), _NothingDrawn():
            model = GPT(hidden, layers, heads, vocab, seq).to(TORCH_DTYPES[dtype])
        tokens = torch.empty(batch, seq, dtype=torch.int64, device="meta")
    except RuntimeError as error:
        raise ConfigError(f"hidden {hidden}, vocab {vocab}, batch {batch} x {seq} tokens: {error}; choose smaller sizes") from None
    num = sum(param.numel() for param in model.parameters())
    title = f"GPT of {_count(num)} parameters: hidden {hidden}, {layers} layers, {batch} x {seq} tokens per device, {dtype}"
    return Subject(title, model, lambda: model(tokens, tokens), batch * seq)


class _NothingDrawn(TorchFunctionMode):
    """Skips initialisers: tensors on the meta device have no values, and initialisers would take most of the time."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__module__", None) == nn.init.__name__:
            return kwargs["tensor"] if kwargs and "tensor" in kwargs else args[0]
        return func(*args, **(kwargs or {}))


def hugging_face(path: Path, seq: int, batch: int, dtype: str) -> Subject:
    """A transformers model from config.json. Takes the class that the file names, or a causal language model, or a model without a head.

    Raises UsageError without the package transformers, and ConfigError if transformers cannot create the model.
    """
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        state = "is no ordinary file" if path.exists() else "does not exist"
        raise ConfigError(f"--model: {path} {state}; name the config.json of a transformers model, or its folder")
    try:
        import transformers
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    except ImportError:
        raise UsageError(f"--model {path} needs transformers: pip install transformers; or give --hidden and --layers") from None
    try:
        found = AutoConfig.from_pretrained(path)
        named = getattr(transformers, (found.architectures or [""])[0], None)
        if named is None or getattr(named, "_from_config", None) is None:
            named = AutoModelForCausalLM if type(found) in AutoModelForCausalLM._model_mapping else AutoModel
        make = named.from_config if named in (AutoModelForCausalLM, AutoModel) else named._from_config
        with torch.device("meta"):
            model = make(found, dtype=TORCH_DTYPES[dtype])
        inputs = _inputs(model, found, seq, batch, dtype)
    except Exception as error:  # any error of transformers, on any file
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"--model {path}: {first}; name the config.json of a model that transformers can create") from None
    num = sum(param.numel() for param in model.parameters())
    title = f"{type(model).__name__} of {_count(num)} parameters: {batch} x {seq} tokens per device, {dtype}"

    def run():
        try:
            return model(**inputs)
        except RuntimeError:  # about sizes: _workload reports it
            raise
        except Exception as error:  # any error of the model's code
            first = (str(error).splitlines() or [type(error).__name__])[0]
            what = f"--model {path}: {type(model).__name__} does not run on {', '.join(inputs)}: {first}"
            raise ConfigError(f"{what}; name a model of text, images or sound, or give --hidden and --layers") from None

    return Subject(title, model, run, batch * seq)


def _inputs(model: nn.Module, config, seq: int, batch: int, dtype: str) -> dict:
    """Training inputs of a transformers model, by the argument names of `forward`: `seq` tokens, sound of about `seq` frames, or images.

    Images have the size in the model's config. Models of tokens also get labels.
    """
    names = inspect.signature(model.forward).parameters
    main = model.main_input_name
    tokens = torch.empty(batch, seq, dtype=torch.int64, device="meta")
    found = {}
    if "input_ids" in names:
        found["input_ids"] = tokens
    if "decoder_input_ids" in names:
        found["decoder_input_ids"] = tokens
    if "labels" in names and main == "input_ids":
        found["labels"] = tokens
    if "use_cache" in names or "cache" in names:
        found["use_cache"] = False
    if "pixel_values" in names:
        vision = getattr(config, "vision_config", config)
        sides = vision.image_size if isinstance(vision.image_size, (list, tuple)) else (vision.image_size,) * 2
        found["pixel_values"] = torch.empty(batch, getattr(vision, "num_channels", 3), *sides, dtype=TORCH_DTYPES[dtype], device="meta")
    if "input_values" in names:
        numel = (seq + 1) * math.prod(getattr(config, "conv_stride", (320,)))
        found["input_values"] = torch.empty(batch, numel, dtype=TORCH_DTYPES[dtype], device="meta")
    return found


@dataclass(frozen=True)
class Largest:
    """Parameters of the largest GPT that fits, within a fifth. is_most: a larger GPT does not fit. Otherwise it has too many tensors."""

    parameters: int
    is_most: bool

    def __str__(self):
        return f"{'about' if self.is_most else 'at least'} {_count(self.parameters)}"


def largest_parameters(machine: Machine, config: Config, arguments, say: Callable[[str], None] = lambda text: None) -> Largest | None:
    """The largest GPT that fits. None if no GPT fits, or if the capacity of a drive is unknown."""
    if machine.drives and not machine.total("capacity"):
        return None
    batch, seq, is_most = arguments.batch, arguments.seq, True

    def sizes(step: int) -> tuple[int, int, int]:
        hidden, layers = formulas.gpt_size(LEAST_PARAMETERS * LARGEST_STEP**step)
        return hidden, layers, 12 * layers * hidden**2

    def has_place(step: int) -> bool:
        try:
            require_place(sizes(step)[-1], machine, config)
        except BudgetError:
            return False
        return True

    def fitting(step: int) -> int | None:
        nonlocal is_most
        hidden, layers, num = sizes(step)
        try:
            with few_tensors():
                subject = gpt(hidden, layers, _num_heads(hidden), arguments.vocab, seq, batch, config.dtype)
            cut_to_fit(subject.model, machine, config)
        except BudgetError:
            return None
        except TooManyTensors:
            is_most = False
            return None
        block = formulas.activation_working_nbytes(batch=batch, seq=seq, hidden=hidden, heads=0)
        checkpoints = formulas.checkpoint_nbytes(batch=batch, seq=seq, hidden=hidden, layers=layers)
        saved = layers * block if arguments.keep_activations else checkpoints + block
        saved = saved * DTYPE_NBYTES[STORAGES[config.dtype].compute] // 2 + batch * seq * arguments.vocab * 8  # logits and their gradients
        chunk_mib = max(16.0 * machine.world, num / COARSE_CHUNKS / 2**19)
        coarse = dataclasses.replace(config, chunk_mib=min(chunk_mib, machine.device_memory / COARSEST_SHARE / 2**20))
        try:
            arrangement(subject.model, Workload((), (), subject.tokens, saved), machine, coarse)
        except BudgetError:
            return None
        return sum(param.numel() for param in subject.model.parameters())

    # A layout takes one or two seconds. The limit is mostly the total memory, which has_place compares. So the search begins at the top.
    least, most, stride, found = -1, bisect.bisect(range(NUM_STEPS), 0, key=lambda step: not has_place(step)), 1, None
    while most - least > 1:
        middle = max(least + 1, most - stride) if found is None else (least + most) // 2
        say(f"the largest GPT that fits: {_count(sizes(middle)[-1])} parameters")
        fits = fitting(middle)
        if fits is None:
            most, stride = middle, 2 * stride
        else:
            least, found = middle, fits
    return None if found is None else Largest(found, is_most)


def require_place(num_parameters: int, machine: Machine, config: Config) -> None:
    """Raise BudgetError if the records need more bytes than all memories and drives have, in any layout."""
    needed = record_layout(num_parameters, Format(config.dtype, moments_dtype=config.optimizer_state_dtype)).nbytes
    if machine.drives and not machine.total("capacity"):
        return
    there = machine.nodes * (machine.total("capacity") + machine.host_memory + machine.devices * machine.device_memory)
    if needed > there:
        raise BudgetError(
            f"nvme: weights and states take {format_bytes(needed)}; all drives and memories hold {format_bytes(there)} together: add drives or nodes"
        )


def cut_to_fit(model: nn.Module, machine: Machine, config: Config) -> None:
    """Tile the layers that the engine would tile. Raises TooManyTensors."""
    budget = auto_device_nbytes(machine) if config.device_memory == "auto" else config.device_memory
    itemsize = DTYPE_NBYTES[STORAGES[config.dtype].compute]
    above, tile = tile_limits(config.tile_above, budget)
    weights = [module.weight for module in model.modules() if isinstance(module, (nn.Linear, nn.Embedding))] if tile else []
    rows = [weight.shape for weight in weights if weight.numel() * itemsize > above]
    num = sum(math.ceil(num_rows / max(1, tile // (num_columns * itemsize))) for num_rows, num_columns in rows)
    if num > MOST_TENSORS:
        raise TooManyTensors(f"the large layers have {num:,} tiles of at most {format_bytes(tile)}")
    with few_tensors():
        tile_to_fit(model, config.tile_above, device_nbytes=budget, itemsize=itemsize)


class TooManyTensors(ConfigError):
    """A model with too many tensors for a plan in reasonable time."""

    def __init__(self, what: str):
        super().__init__(
            f"{what}; a plan may have at most {MOST_TENSORS:,} tensors: choose fewer layers, or larger tiles by larger devices or tile_above"
        )


@contextlib.contextmanager
def few_tensors() -> Iterator[None]:
    """A context that raises TooManyTensors as soon as code inside registers more than MOST_TENSORS parameters."""
    num = 0

    def count(module, name, param):
        nonlocal num
        num += 1
        if num > MOST_TENSORS:
            raise TooManyTensors(f"the model has more than {MOST_TENSORS:,} parameter tensors")

    registered = nn.modules.module.register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        registered.remove()


def plot_efficiency(machine: Machine, path: Path) -> None:
    """Draw the efficiency by bandwidth at this machine's peak, as in figure 3 of the ZeRO-Infinity paper."""
    plt = pyplot()
    peak, seq = machine.device_tflops * 1e12, 1024
    panels = [
        ("weights and gradients", [(f"batch {b}", formulas.weights_intensity(batch=b, seq=seq)) for b in (1, 2, 4, 8, 16)]),
        ("optimizer states", [(f"batch {b}", formulas.states_intensity(batch=b, seq=seq)) for b in (2, 4, 8, 16, 32)]),
        ("activation checkpoints", [(f"hidden {h // 1024}K", formulas.activations_intensity(hidden=h)) for h in (2048, 8192, 16384, 32768, 65536)]),
    ]
    rates = {"H2D": machine.h2d_all_gbps, "gather": machine.gather_gbps, "NVMe": machine.drive_gbps("mixed") / machine.devices}
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), sharey=True, layout="constrained")
    for axis, (title, curves) in zip(axes, panels):
        bandwidths = [10 ** (exponent / 20) for exponent in range(-20, 81)]
        for label, intensity in curves:
            axis.plot(bandwidths, [100 * formulas.efficiency(intensity, gbps * 1e9, peak) for gbps in bandwidths], label=label)
        for name, gbps in rates.items():
            if gbps:
                axis.axvline(gbps, color="grey", linestyle=":", linewidth=1)
                axis.text(gbps, 98, name, rotation=90, fontsize=8, color="grey", va="top", ha="right")
        axis.set(xscale="log", xlabel="GB/s per device", title=title, ylim=(0, 100), xlim=(0.1, 1e4))
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of peak, %")
    figure.suptitle(f"Efficiency without overlap, sequence {seq}, {machine.device_tflops:.0f} TFLOP/s per device")
    figure.savefig(path, dpi=120)
    plt.close(figure)


# Arguments


def _machine(arguments) -> Machine:
    path = arguments.machine
    if path is None:
        path = Path(config_files.DEFAULT_NAME)
        if not path.is_file() or "machine" not in config_files.read(path):
            raise ConfigError(
                f"no machine is given: measure this one with `infinity calibrate DIR...`, which writes {path}, or name a file: --machine FILE"
            )
    given = {name: getattr(arguments, name) for name in ("nodes", "devices")}
    machine = dataclasses.replace(Machine.load(path), **{name: value for name, value in given.items() if value is not None})
    machine.require_rates()
    return machine


def _subject(arguments, config: Config) -> Subject:
    if arguments.model is not None:
        if given := [name for name in ("params", "hidden", "layers", "heads") if getattr(arguments, name)]:
            raise ConfigError(f"--model defines the sizes; leave out --{given[0]}")
        return hugging_face(arguments.model, arguments.seq, arguments.batch, config.dtype)
    hidden, layers = arguments.hidden, arguments.layers
    if arguments.params is not None:
        if hidden or layers:
            raise ConfigError("--params chooses the sizes; leave out --hidden and --layers, or give only these two")
        hidden, layers = formulas.gpt_size(arguments.params)
    elif not (hidden and layers):
        raise ConfigError("no model is given: use --params 7B, or --hidden and --layers, or --model config.json")
    heads = arguments.heads or _num_heads(hidden)
    if hidden % heads:
        raise ConfigError(f"--heads {heads} does not divide --hidden {hidden}; choose one that does")
    return gpt(hidden, layers, heads, arguments.vocab, arguments.seq, arguments.batch, config.dtype)


def _workload(subject: Subject, *, recompute: bool) -> Workload:
    try:
        return workload(subject.model, subject.run, tokens=subject.tokens, recompute=recompute)
    except RuntimeError as error:  # the sizes of activations overflow
        raise ConfigError(f"{subject.title}: {str(error).splitlines()[0]}; choose a smaller batch or sequence") from None


def _num_heads(hidden: int) -> int:
    """The number of heads with about 128 elements each."""
    most = max(1, hidden // 128)
    return next(heads for heads in range(most, 0, -1) if hidden % heads == 0)


# Results


def _report(prediction: Prediction, largest: Largest | None) -> dict:
    machine, simulation = prediction.machine, prediction.simulation
    num = prediction.layout.num_parameters
    nums = {link: num if link in ("all_gather", "reduce_scatter") else num / machine.world for link in TITLES}  # others: a rank's share
    written = simulation.nbytes["nvme_write"] * machine.world / simulation.step_seconds * DAY_SECONDS
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
                "bytes_per_step": simulation.nbytes[link],
                "bytes_per_parameter": simulation.nbytes[link] / nums[link],
                "busy_seconds": simulation.busy_seconds[link],
                "stall_seconds": simulation.stall_seconds[link],
            }
            for link in TITLES
        },
        "step_seconds": simulation.step_seconds,
        "compute_seconds": prediction.compute_seconds,
        "tokens_per_second": prediction.workload.tokens * machine.world / simulation.step_seconds,
        "bottleneck": prediction.bottleneck,
        "hiding_tokens": prediction.hiding_tokens,
        "hiding_tokens_in_turn": prediction.hiding_tokens_in_turn if math.isfinite(prediction.hiding_tokens_in_turn) else None,
        "largest_parameters": largest and largest.parameters,
        "written_bytes_per_day": written,
        "endurance_days": endurance / written if written and endurance else None,
    }


def _text(subject: Subject, prediction: Prediction, report: dict, largest: Largest | None) -> str:
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
        f"machine   {_title(machine)}",
        f"chunks    {report['num_chunks']:,} of at most {format_bytes(report['chunk_bytes'])}, each sharded over {machine.world} rank(s)"
        f"{', compressed on NVMe' if report['compresses_nvme'] else ''}",
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
    if report["written_bytes_per_day"]:
        worn = f"; the drives' endurance lasts {report['endurance_days']:,.0f} days" if report["endurance_days"] else ""
        lines.append(f"wear      {report['written_bytes_per_day'] / 1e12:,.1f} TB written per day{worn}")
    return "\n".join(lines)


def when_hidden(prediction: Prediction) -> str:
    """The number of tokens per step that hides all transfers, by layer and with micro-batches one after the other, in words."""
    now, by_layer, in_turn = prediction.workload.tokens, prediction.hiding_tokens, prediction.hiding_tokens_in_turn
    if not by_layer:
        return "the step has no transfers to hide"
    text = f"compute hides every transfer from {by_layer:,.0f} tokens per step and device on (now {now:,})"
    if by_layer > now:
        loop = f"from {in_turn:,.0f} tokens on" if math.isfinite(in_turn) else "with no number of tokens"
        text += f", in micro-batches of {now:,} with infinity.accumulate; with micro-batches one after the other, {loop}"
    return text


def _title(machine: Machine) -> str:
    nodes = "" if machine.nodes == 1 else f"{machine.nodes} nodes, each "
    return f"{machine.name + ': ' if machine.name else ''}{nodes}{machine.devices} device(s), {len(machine.drives)} drive(s)"


def _percent(share: float) -> str:
    """A share in percent. 0% means exactly zero."""
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def _count(num: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if num >= size:
            return f"{num / size:.4g} {unit}"
    return f"{num:,.0f}"
