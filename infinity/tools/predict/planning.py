"""The `plan` command: whether a model fits a machine, the time of a step, and the waits in the step.

Knows predictions and their output. Must not know how a prediction is made, or the spelling of options.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from pathlib import Path

from infinity import config_files
from infinity.config import Config, command_layers
from infinity.errors import BudgetError, ConfigError, UsageError
from infinity.output import check_file, check_plot, give, pyplot
from infinity.simulation.threads import Deadlock
from infinity.system.capacity import num_cores
from infinity.tools.machine import Machine
from infinity.tools.meta_models import MOST_NAMED_TENSORS, Subject, few_tensors, gpt, gpt_size, hugging_face, num_heads
from infinity.tools.predict import formulas
from infinity.tools.predict.largest_model import largest_parameters, require_place
from infinity.tools.predict.plan_report import machine_title, plan_report, plan_text
from infinity.tools.predict.prediction import Prediction, predict
from infinity.tools.predict.simulated_run import TrainingStep
from infinity.tools.progress import Progress


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
    with few_tensors(MOST_NAMED_TENSORS if arguments.model else None):
        subject = _subject(arguments, config)
    largest = None
    try:
        with Progress() as progress:
            say = functools.partial(progress.show, last=True) if progress.live else lambda text: None
            num = sum(param.numel() for param in subject.model.parameters() if param.requires_grad)  # a frozen base may be quantised
            with contextlib.suppress(BudgetError):  # require_place raises it again below, once the largest model is known
                require_place(num, machine, config)
            if not arguments.model:
                largest = largest_parameters(machine, config, arguments, say)
            require_place(num, machine, config)
            say(f"{subject.title}: training without bytes")
            _use_one_core()
            prediction = _predicted(subject, machine, config, TrainingStep(recompute=not arguments.keep_activations))
    except BudgetError as error:
        text = f"{subject.title}\ndoes not fit {machine_title(machine)}: {error}"
        if largest:
            text += f"\nthe largest GPT that fits has {largest} parameters"
        give({"fits": False, "short": str(error), "largest_parameters": largest and largest.parameters}, text, arguments.json, arguments.output)
        return 1
    report = plan_report(prediction, largest)
    give(report, plan_text(subject, prediction, report, largest), arguments.json, arguments.output)
    return 0


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
    machine = dataclasses.replace(machine, cores=machine.cores or num_cores())  # counted before `_use_one_core`
    machine.require_rates()
    return machine


def _subject(arguments, config: Config) -> Subject:
    if arguments.model is not None:
        if given := [name for name in ("params", "hidden", "layers", "heads") if getattr(arguments, name)]:
            raise ConfigError(f"--model defines the sizes; leave out --{given[0]}")
        return hugging_face(arguments.model, arguments.seq, arguments.batch, config.dtype, adapters=arguments.adapters)
    if arguments.adapters:
        raise ConfigError("--adapters are for a transformers model: name its config.json with --model")
    hidden, layers = arguments.hidden, arguments.layers
    if arguments.params is not None:
        if hidden or layers:
            raise ConfigError("--params chooses the sizes; leave out --hidden and --layers, or give only these two")
        hidden, layers = gpt_size(arguments.params)
    elif not (hidden and layers):
        raise ConfigError("no model is given: use --params 7B, or --hidden and --layers, or --model config.json")
    heads = arguments.heads or num_heads(hidden)
    if hidden % heads:
        raise ConfigError(f"--heads {heads} does not divide --hidden {hidden}; choose one that does")
    return gpt(hidden, layers, heads, arguments.vocab, arguments.seq, arguments.batch, config.dtype)


def _use_one_core() -> None:
    """Of the simulated threads one runs at a time. On one core a thread takes over in less time. For the rest of this process."""
    with contextlib.suppress(OSError, AttributeError, LookupError, ValueError):  # not on Linux, or not allowed
        present = Path("/proc/thread-self/stat").read_text().rpartition(")")[2].split()[36]
        os.sched_setaffinity(0, {int(present)})


def _predicted(subject: Subject, machine: Machine, config: Config, step: TrainingStep) -> Prediction:
    try:
        return predict(subject, machine, config, step)
    except (ConfigError, UsageError, Deadlock):
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:  # of the model's code, or sizes that overflow
        first = (str(error).splitlines() or [type(error).__name__])[0]
        what = f"{type(subject.model).__name__} does not run on {', '.join(subject.inputs)}: {first}"
        remedy = "choose a smaller batch or sequence, name a model of text, images or sound, or give --hidden and --layers"
        raise ConfigError(f"{what}; {remedy}") from error
