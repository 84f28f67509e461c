"""The largest GPT that fits a machine: a search over sizes.

Knows sizes of GPTs, layouts and budgets. Must not know the time of a step, or how the result is shown.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from infinity.config import Config
from infinity.errors import BudgetError
from infinity.formats.format import DTYPE_NBYTES, STORAGES, Format, storage_of
from infinity.plan.record import record_layout
from infinity.sizes import format_bytes
from infinity.tools.machine import Machine
from infinity.tools.meta_models import TooManyTensors, few_tensors, format_count, gpt, gpt_size, num_heads
from infinity.tools.predict import formulas
from infinity.tools.predict.prediction import COARSE_CHUNKS, COARSEST_SHARE, require_room

# Sizes in the search for the largest model: from 10^6 to about 3 * 10^16 parameters.
LEAST_PARAMETERS, LARGEST_STEP, NUM_STEPS = 1e6, 2**0.25, 140


@dataclass(frozen=True)
class Largest:
    """Parameters of the largest GPT that fits, within a fifth. is_most: a larger GPT does not fit. Otherwise it has too many tensors."""

    parameters: int
    is_most: bool

    def __str__(self):
        return f"{'about' if self.is_most else 'at least'} {format_count(self.parameters)}"


def largest_parameters(machine: Machine, config: Config, arguments, say: Callable[[str], None] = lambda text: None) -> Largest | None:
    """The largest GPT that fits. None if no GPT fits, or if the capacity of a drive is unknown."""
    if machine.drives and not machine.total("capacity"):
        return None
    batch, seq, is_most = arguments.batch, arguments.seq, True

    def sizes(step: int) -> tuple[int, int, int]:
        hidden, layers = gpt_size(LEAST_PARAMETERS * LARGEST_STEP**step)
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
        block = formulas.activation_working_nbytes(batch=batch, seq=seq, hidden=hidden, heads=0)
        checkpoints = formulas.checkpoint_nbytes(batch=batch, seq=seq, hidden=hidden, layers=layers)
        saved = layers * block if arguments.keep_activations else checkpoints + block
        saved = saved * DTYPE_NBYTES[STORAGES[config.dtype].compute] // 2 + batch * seq * arguments.vocab * 8  # logits and their gradients
        chunk_mib = max(16.0 * machine.world, num / COARSE_CHUNKS / 2**19)
        coarse = dataclasses.replace(config, chunk_mib=min(chunk_mib, machine.device_memory / COARSEST_SHARE / 2**20))
        try:
            with few_tensors():
                subject = gpt(hidden, layers, num_heads(hidden), arguments.vocab, seq, batch, config.dtype)
            require_room(subject, machine, coarse, saved)
        except BudgetError:
            is_most = True
            return None
        except TooManyTensors:
            is_most = False
            return None
        return sum(param.numel() for param in subject.model.parameters())

    # A layout takes one or two seconds. The limit is mostly the total memory, which has_place compares. So the search begins at the top.
    least, most, stride, found = -1, bisect.bisect(range(NUM_STEPS), 0, key=lambda step: not has_place(step)), 1, None
    while most - least > 1:
        middle = max(least + 1, most - stride) if found is None else (least + most) // 2
        say(f"the largest GPT that fits: {format_count(sizes(middle)[-1])} parameters")
        fits = fitting(middle)
        if fits is None:
            most, stride = middle, 2 * stride
        else:
            least, found = middle, fits
    return None if found is None else Largest(found, is_most)


def require_place(num_parameters: int, machine: Machine, config: Config) -> None:
    """Raise BudgetError if the records need more bytes than all memories and drives have, in any layout."""
    needed = record_layout(num_parameters, Format(storage_of(config.dtype, config.master), moments_dtype=config.optimizer_state_dtype)).nbytes
    if machine.drives and not machine.total("capacity"):
        return
    there = machine.nodes * (machine.total("capacity") + machine.host_memory + machine.devices * machine.device_memory)
    if needed > there:
        raise BudgetError(
            f"nvme: weights and states take {format_bytes(needed)}; all drives and memories hold {format_bytes(there)} together: add drives or nodes"
        )
