"""Names of an engine's states in a checkpoint of torch.distributed.checkpoint (DCP), so that a run can move to FSDP2 and back.

Knows names, and the boxes of a parameter in a record. Must not know how DCP writes or reads.

# [Note: entries of a DCP checkpoint]
# An FSDP2 run writes the same entries by `dcp.save({"model": m, "optim": o})` with m, o = get_state_dict(model, optimizer):
#   model.<name>                    weights in fp32 (masters if there are any), under each name of a tied parameter; buffers unchanged
#   optim.state.<name>.<moment>     fp32, under the first name: exp_avg and exp_avg_sq of AdamW and Adam, momentum_buffer of SGD, exp_avg of
#                                   Lion; for other rules, the rule's own names
#   optim.state.<name>.step         number of updates, under the first name, also before the first update
#   optim.param_groups.<index>.*    hyper-parameters; those that only torch.optim has get torch's default values; `params`: names
# A tiled layer appears as the plain layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from infinity.checkpoints.contents import persistent_buffers
from infinity.engine.access.training_state import ParameterInfo, TrainingState
from infinity.errors import CheckpointError
from infinity.model import tiling
from infinity.optim.muon import MuonRule
from infinity.optim.rules import AdamRule, LionRule, Rule, SGDRule

METADATA = ".metadata"  # the file that marks a directory as a DCP checkpoint
Box = tuple[tuple[int, ...], tuple[int, ...]]  # (first index, size), one number per dimension in each


@dataclass
class WholeParameter:
    """A parameter of the plain model. The engine has it whole or in tiles (`parts`). names: in the order of the state_dict."""

    shape: tuple[int, ...]
    names: list[str] = field(default_factory=list)
    parts: list[ParameterInfo] = field(default_factory=list)

    @property
    def is_updated(self) -> bool:
        """Whether an optimizer has moments of this parameter."""
        return self.parts[0].trainable and self.parts[0].group is not None


@dataclass(frozen=True)
class Tile:
    """The place of an engine's parameter in the whole parameter."""

    whole: WholeParameter
    begin: tuple[int, ...]


class Names:
    """Names in an engine's model: `wholes`, `parts` by the engine's index, and `loose` tensors, which are in no record."""

    def __init__(self, state: TrainingState):
        model, places = state.model, tiling.places(state.model)
        infos = {id(info.param): info for info in state.parameters}
        self.parts: dict[int, Tile] = {}
        self.loose: dict[str, torch.Tensor] = {}
        by_name: dict[str, WholeParameter] = {}
        for prefix, module in model.named_modules(remove_duplicate=False):
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                raise CheckpointError(f"{prefix or type(module).__name__} has extra state, which is not carried to or from DCP")
            dot = f"{prefix}." if prefix else ""
            for name, param in dict.items(module._parameters):
                info, place = infos.get(id(param)), places.get(param) if param is not None else None
                if info is None:
                    if param is not None:
                        self.loose[dot + name] = param
                    continue
                first, shape = (place.name, place.shape) if place is not None else (info.name, tuple(info.shape))
                whole = by_name.setdefault(first, WholeParameter(shape, [first]))
                key = dot.rpartition("tiles.")[0] + name if place is not None else dot + name
                if key not in whole.names:
                    whole.names.append(key)
                if info.index not in self.parts:
                    whole.parts.append(info)
                    self.parts[info.index] = Tile(whole, place.begin if place is not None else (0,) * len(shape))
            self.loose |= {dot + name: buffer for name, buffer in persistent_buffers(module).items()}
        self.wholes = list(by_name.values())
        self._first = {id(info.param): whole.names[0] for whole in self.wholes for info in whole.parts}
        for whole in self.wholes:
            if len({(info.trainable, info.group) for info in whole.parts}) > 1:
                raise CheckpointError(f"tiles of {whole.names[0]} differ in their parameter group or in whether they are frozen")

    def of_group(self, params: Iterable[nn.Parameter]) -> list[str]:
        """The names of a parameter group's parameters, without duplicates."""
        loose = {id(value): name for name, value in reversed(self.loose.items())}
        names = (self._first.get(id(param)) or loose.get(id(param)) for param in params)
        return [name for name in dict.fromkeys(names) if name is not None]


def moments_of(state: TrainingState, whole: WholeParameter) -> dict[str, str]:
    """Map each moment of a parameter that an optimizer updates to its name in torch.optim."""
    return moment_names(state.rule_of(whole.parts[0].group))


def moment_names(rule: Rule) -> dict[str, str]:
    """Map each moment of a rule to its name in torch.optim. A rule that torch.optim lacks keeps its own names.

    Raises CheckpointError for a rule whose moments have other shapes than the parameter.
    """
    known = {}
    if type(rule).moment_shapes is not Rule.moment_shapes:
        raise CheckpointError(f"{type(rule).__name__} has moments of other shapes than the parameters: use infinity.save and infinity.load")
    if isinstance(rule, AdamRule):
        known = {"momentum": "exp_avg", "variance": "exp_avg_sq"}
    elif isinstance(rule, (SGDRule, LionRule, MuonRule)):
        known = {"momentum": "exp_avg" if isinstance(rule, LionRule) else "momentum_buffer"}
    return {moment: known.get(moment, moment) for moment in rule.moments}


def defaults_of_torch(rule: Rule) -> dict:
    """The hyper-parameters of torch's optimizer for this rule, with default values, in the installed version of torch."""
    if isinstance(rule, AdamRule):
        kind = torch.optim.AdamW if rule.decoupled else torch.optim.Adam
    elif isinstance(rule, SGDRule):
        kind = torch.optim.SGD
    else:
        return {}
    return {name: value for name, value in kind([nn.Parameter(torch.zeros(1, device="cpu"))]).param_groups[0].items() if name != "params"}


def boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """Cut elements [begin, end) of a row-major tensor into boxes, in order."""
    if begin == end:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    while begin < end:
        first, within = divmod(begin, row)
        if within or end - begin < row:
            stop = min(row, within + end - begin)
            for offsets, sizes in boxes(shape[1:], within, stop):
                yield (first, *offsets), (1, *sizes)
            begin += stop - within
        else:
            num_rows = (end - begin) // row
            yield (first, *(0 for _ in shape[1:])), (num_rows, *shape[1:])
            begin += num_rows * row


def plain(value: object) -> object:
    return value.item() if isinstance(value, torch.Tensor) else value
