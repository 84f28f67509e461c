"""Values of one engine's parameters: read, written and gathered by the program, before the start, between steps and while held.

Knows parameters by index, and the parts of the engine that store values. Must not know the events that start an engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import torch
from torch import nn

from infinity.engine.access.lifecycle import Lifecycle
from infinity.engine.steps.chunk_updates import note_change
from infinity.errors import ConfigError, UsageError
from infinity.model.autograd_state import autograd_runs
from infinity.model.parameters import forget_owner
from infinity.system.interrupts import uninterrupted
from infinity.system.ranks import Ranks
from infinity.tiers.span_state import SpanState
from infinity.tiers.values import Change


class InitialValues:
    """Values before the start. In this class each parameter holds its values. A subclass may have moved some away."""

    def value(self, index: int, param: nn.Parameter) -> torch.Tensor:
        """The initial value of a parameter, 1-D, on any device."""
        return param.detach().reshape(-1)

    def bring_home(self, params: list[nn.Parameter]) -> None:
        """Bring the values back into these parameters."""

    def send_away(self) -> None:
        """Values that were brought back may be moved away again."""


class ParameterValues:
    """The program's access to values. named: the parameters, in order. first: values before the start."""

    def __init__(self, lifecycle: Lifecycle, ranks: Ranks, named: list[tuple[str, nn.Parameter]], first: InitialValues):
        self._lifecycle, self._ranks, self._named, self._first = lifecycle, ranks, named, first
        self._initial = first.value
        self._indices = {id(param): index for index, (_, param) in enumerate(named)}
        self._loaded: dict[int, torch.Tensor] = {}  # values that were read or written before the start, by index
        self._exact: dict[int, torch.Tensor] = {}  # values that parameters with these ids hold in rounded form
        self._dtypes: list[torch.dtype] = []
        self._gathered: list[dict[SpanState, torch.Tensor]] = []  # the values at the begin of each open block of `gathered`
        self._changed: set[SpanState] = set()  # spans that such a block has changed, until nothing holds them
        self._reader: Callable[[nn.Parameter], torch.Tensor] | None = None  # makes the values of a state_dict, inside `read_by`

    def renew(self, named: list[tuple[str, nn.Parameter]], dtypes: list[torch.dtype]) -> None:
        """Take another list of parameters, with their dtypes, before the start. Parameters may have new names and places.

        Raises UsageError for a new parameter that was computed from placeholders.
        """
        self._dtypes = dtypes
        before, initial, loaded, own = self._indices, self._initial, self._loaded, InitialValues().value
        self._named, self._indices = named, {id(param): index for index, (_, param) in enumerate(named)}
        self._exact = {key: value for key, value in self._exact.items() if key in self._indices}
        if self._indices == before:
            return
        for name, param in named:
            if id(param) not in before and param.isnan().any():
                raise UsageError(
                    f"{name} has joined the model with NaN values, as if it was computed from parameters whose values are away. Make {name} "
                    f"inside `with infinity.init(config):`, or inside infinity.gathered of these parameters."
                )
        values = {index: value for index, (_, param) in enumerate(named) if (value := loaded.get(before.get(id(param)))) is not None}
        self._loaded = values
        self._initial = lambda index, param: initial(before[id(param)], param) if id(param) in before else own(index, param)

    def begin(self, parts, cycle) -> None:
        """Take the parts of the started engine."""
        self.registry, self.values, self.weights = parts.registry, parts.values, parts.weights
        self.cycle, self.calls = cycle, cycle.calls
        averaging = cycle.averaging
        self.values.follow_average(lambda: averaging.last_step)

    def trained(self) -> dict[int, str]:
        """Names of the parameters that train now, by id."""
        return {id(param): name for name, param in self._named if param.requires_grad}

    def manages(self, param: torch.Tensor) -> bool:
        return id(param) in self._indices

    def initial_value(self, index: int, param: nn.Parameter) -> torch.Tensor:
        exact = self._exact.pop(id(param), None)
        if exact is not None and exact.numel == param.numel() and torch.equal(exact.to(param.dtype).view(param.shape), param.detach().cpu()):
            return exact
        return self._loaded.pop(index) if index in self._loaded else self._initial(index, param)

    def give_back(self) -> dict[int, str]:
        """The engine ends without a start: release the parameters that hold their values. Returns the names of the others, by address."""
        away = {}
        with torch._C.DisableTorchFunctionSubclass():
            for name, param in self._named:
                if is_here(param):
                    forget_owner(param)
                else:
                    away[param.data_ptr()] = name
        return away

    # Values.

    def read_state(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        self.cycle.refuse_half_updated("read_state()")
        state = self.registry.find(param)
        if state is None:
            raise ConfigError("the parameter does not belong to this engine")
        return self.values.read(state)

    def num_updates(self, param: torch.Tensor) -> int:
        """Completed updates of a parameter. An update that is running is not counted."""
        state = self.registry.find(param)
        return max(chunk.steps[state.index] for chunk in self.registry.chunks_of(state))

    def is_held(self, param: torch.Tensor) -> bool:
        """Whether the program may read and change the parameter now, as inside `gathered` or the forward of its module."""
        return self._lifecycle.has_started and self.registry.params[self._indices[id(param)]].num_holders > 0

    @uninterrupted
    def read_weight(self, param: torch.Tensor) -> torch.Tensor:
        """A copy of a parameter's whole value, on the CPU, in the compute dtype. All ranks must make this call."""
        self._lifecycle.check_access("state_dict()")
        if self._reader is not None:
            return self._reader(param)
        index = self._indices[id(param)]
        if not self._lifecycle.has_started:
            if index not in self._loaded:
                if is_here(param):
                    return param.detach().to("cpu", self._dtypes[index], copy=True)
                self._loaded[index] = self._initial(index, param).cpu()
            return self._loaded[index].to(self._dtypes[index], copy=True).reshape(param.shape)
        if self.is_held(param):
            return param.detach().to("cpu", copy=True)
        self.cycle.refuse_half_updated("state_dict()")
        return self.values.read(self.registry.params[index], weight_only=True)["weight"]

    @contextlib.contextmanager
    def read_by(self, reader: Callable[[nn.Parameter], torch.Tensor]):
        """Inside the block, `reader` makes the value of each parameter in a state_dict."""
        self._reader = reader
        try:
            yield
        finally:
            self._reader = None

    @uninterrupted
    def write_weight(self, param: torch.Tensor, value: torch.Tensor) -> None:
        """Set a parameter's value; moments stay. All ranks must make this call, and take the value of rank 0."""
        value = value.detach().reshape(-1).to("cpu", copy=True)
        self._ranks.broadcast_(value.view(torch.uint8))
        self.give(param, value)

    @uninterrupted
    def give(self, param: torch.Tensor, value) -> None:
        """Set a parameter's value to one that is equal on all ranks. value: any object whose slices are 1-D tensors on the CPU."""
        self._lifecycle.check_access("a new value of a weight")
        index = self._indices[id(param)]
        if not self._lifecycle.has_started:
            if is_here(param):  # the program may change the value again
                with torch.no_grad():
                    param.copy_(value[: param.numel()].view(param.shape))
                if getattr(value, "is_decoded", False):
                    self._exact[id(param)] = value
            else:
                self._loaded[index] = value
            return
        self.cycle.refuse_half_updated("new weights", change=True)
        state = self.registry.params[index]
        if not self.calls.frames and not autograd_runs():
            self.calls.release_escaped()
        if self.weights.is_held(self.registry.span_of(state)):
            raise UsageError(f"{state.name} is given a value while the model runs or inside infinity.gathered: end that first")
        self.values.write_weight(state, value)
        for chunk in self.registry.chunks_of(state):
            if not chunk.weights_home.is_device and not chunk.on_device:
                self.cycle.updates.make_stale(chunk)
        note_change(state)

    @uninterrupted
    @torch.no_grad()
    def change_weights(self, params: Iterable[torch.Tensor], change: Change) -> None:
        """Call change(weight, moments) for the elements of these parameters, wherever they are; see `Optimizer.change_weights`."""
        what = "change_weights()"
        self._lifecycle.check_between_steps(what)
        found = {state.index for param in params if (state := self.registry.find(param)) is not None and state.trainable}
        for chunk in self.registry.chunks:
            if found & chunk.whole_pieces.keys():
                self.make_way_for_change(chunk, what)
                self.values.change_masters(chunk, found, change)

    def make_way_for_change(self, chunk, what: str) -> None:
        """Finish the update of a chunk whose weights are about to change, and invalidate the device copy."""
        if not self.calls.frames and not autograd_runs():
            self.calls.release_escaped()
        if self.weights.is_held(chunk.span):
            raise UsageError(f"{what} while weights of {chunk.title} are in use, by a running module or infinity.gathered. End that before")
        self.values.updater.finish(chunk)
        self.cycle.updates.make_stale(chunk)

    @contextlib.contextmanager
    def gathered(self, params: Iterable[torch.Tensor]):
        self.cycle.refuse_half_updated("infinity.gathered", change=True)
        states = [self.registry.find(param) for param in params if param.numel() and param.is_floating_point()]
        if None in states:
            raise ConfigError("infinity.gathered: a parameter does not belong to this engine")
        before: dict[SpanState, torch.Tensor] = {}
        self._gathered.append(before)
        try:
            self._gather(dict.fromkeys(self.registry.span_of(state) for state in states), before)
            with self.calls.saved_tensors():
                yield
        finally:
            self._gathered = [each for each in self._gathered if each is not before]
            self._adopt(before)

    @contextlib.contextmanager
    def gathered_first(self, params: Iterable[torch.Tensor], device: torch.device):
        """Like `gathered`, before the start. The block changes initial values, in the dtype that each parameter was made with."""
        params = [param for param in params if param.numel() and param.is_floating_point()]
        if not all(map(self.manages, params)):
            raise ConfigError("infinity.gathered: a parameter does not belong to this engine")
        self._first.bring_home([param for param in params if not is_here(param)])
        for param in params:
            if (value := self._loaded.pop(self._indices[id(param)], None)) is not None:
                param.data = value[: param.numel()].to(param.dtype, copy=True).view(param.shape)
        homes = [param.device for param in params]
        for param in params:
            param.data = param.data.to(device)
        try:
            yield
        finally:
            self._lifecycle.check_open()
            if not self._lifecycle.has_started:
                for param, home in zip(params, homes):
                    self._take_first(param, home)
                self._first.send_away()

    def _take_first(self, param: nn.Parameter, home: torch.device) -> None:
        """All ranks take the value of rank 0. The value goes back to the device where the parameter was made."""
        if self._ranks.are_several:
            value = param.detach().to("cpu", copy=True)
            self._ranks.broadcast_(value.view(-1).view(torch.uint8))
            param.data = value
        param.data = param.data.to(home)

    @uninterrupted
    def _gather(self, spans: Iterable[SpanState], before: dict[SpanState, torch.Tensor]) -> None:
        """Hold these spans, and copy their values before the program changes them."""
        self.weights.acquire_aside(list(spans))
        for span in spans:
            self.values.keep_written(span)
        before.update({span: span.flat.clone() for span in spans})
        for span in spans:
            for state in span.params:
                state.hold()

    @uninterrupted
    def _adopt(self, before: dict[SpanState, torch.Tensor]) -> None:
        if before:
            self._lifecycle.check_open()
        for span, value in before.items():
            try:
                span.written()
            finally:
                for state in span.params:
                    state.version = state.counter._version
                    state.release()
                if self.values.adopt(span, (), value):
                    self._changed.add(span)
                    for outer in self._gathered:  # blocks around this one: the records have these values now
                        if span in outer:
                            outer[span] = span.flat.clone()
                self.weights.release(span)
                if span in self._changed and not self.weights.is_held(span):
                    self._changed.remove(span)
                    self.weights.note_rounded(span)

    # Called by parameters: [Note: parameters with two classes] in parameters.py.

    def name_of(self, param: nn.Parameter) -> str:
        return self._named[self._indices[id(param)]][0]

    def may_compute(self, params: list[nn.Parameter]) -> bool:
        """Whether the program may read parameters that nothing holds: inside an op of this engine."""
        return self._lifecycle.has_started and self.calls.reads.may_compute(list(map(self.registry.find, params)))

    def compute(self, params: list[nn.Parameter], func, args: tuple, kwargs: dict):
        """Call func(*args, **kwargs) while these parameters are held."""
        return self.calls.reads.compute(list(map(self.registry.find, params)), func, args, kwargs)

    def look_at_gradients(self):
        """A context inside which a backward pass only returns gradients."""
        if not self._lifecycle.has_started:
            return contextlib.nullcontext()
        return self.cycle.autograd_grad.running(scaled=self.cycle.scaler is not None)

    def departed_gradient(self, param: nn.Parameter) -> torch.Tensor | None:
        """In a backward pass: the placeholder of a gradient that has left the device, or None."""
        if not self._lifecycle.has_started or not self.cycle.state.in_backward:
            return None
        return self.cycle.param_grads.departed(self.registry.find(param))

    def take(self, param: nn.Parameter, data: torch.Tensor) -> None:
        """Take data that the program assigns to a held parameter."""
        self.registry.find(param).put(data)


def is_here(param: nn.Parameter) -> bool:
    """Whether the parameter holds its values. All elements of a placeholder of `infinity.init` share one NaN."""
    here = param.untyped_storage().nbytes() >= param.numel() * param.element_size()
    return here and (param.numel() > 1 or not param.isnan().item())
