"""What the parameters of one engine answer the program: their values before the start, between two steps and where they are held.

Knows parameters by their index and the parts that have their values. Must not know who asks, nor what starts an engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import torch
from torch import nn

from infinity.engine.steps.chunk_updates import note_change
from infinity.engine.access.between_steps import Gate
from infinity.engine.steps.step_cycle import autograd_runs
from infinity.errors import ConfigError, UsageError
from infinity.model.parameters import forget_owner
from infinity.system.interrupts import uninterrupted
from infinity.system.ranks import Ranks
from infinity.tiers.span_state import SpanState


class FirstValues:
    """The parameters' values before the start: each parameter has its own."""

    def value(self, index: int, param: nn.Parameter) -> torch.Tensor:
        """A parameter's value at the start, 1-D, on any device."""
        return param.detach().reshape(-1)

    def bring_home(self, params: list[nn.Parameter]) -> None:
        """Give these parameters their values."""

    def send_away(self) -> None:
        """The parameters' current values may leave for their tier again."""


class Answers:
    """named: the parameters, in order. first: the parameters' values before the start."""

    def __init__(self, gate: Gate, ranks: Ranks, named: list[tuple[str, nn.Parameter]], first: FirstValues):
        self._gate, self._ranks, self._named, self._first = gate, ranks, named, first
        self._initial = first.value
        self._indices = {id(param): index for index, (_, param) in enumerate(named)}
        self._loaded: dict[int, torch.Tensor] = {}  # values that were asked for or given before the start, by index
        self._dtypes: list[torch.dtype] = []

    def renew(self, named: list[tuple[str, nn.Parameter]], dtypes: list[torch.dtype]) -> None:
        """The engine has these parameters from now on, in these dtypes. Their names and places may have changed. The engine has not started.
        Raises UsageError for a parameter that was made of values which are away."""
        self._dtypes = dtypes
        before, initial, loaded, own = self._indices, self._initial, self._loaded, FirstValues().value
        self._named, self._indices = named, {id(param): index for index, (_, param) in enumerate(named)}
        if self._indices == before:
            return
        for name, param in named:
            if id(param) not in before and param.isnan().any():
                raise UsageError(
                    f"{name} has joined the model with values that are no numbers, as if made of parameters whose values have left. Make it "
                    f"inside `with infinity.init(config):`, or inside infinity.gathered of what it is made of."
                )
        values = {index: value for index, (_, param) in enumerate(named) if (value := loaded.get(before.get(id(param)))) is not None}
        self._loaded = values
        self._initial = lambda index, param: initial(before[id(param)], param) if id(param) in before else own(index, param)

    def begin(self, parts, cycle) -> None:
        """The engine has its parts."""
        self.registry, self.values, self.weights = parts.registry, parts.values, parts.weights
        self.cycle, self.calls = cycle, cycle.calls

    def manages(self, param: torch.Tensor) -> bool:
        return id(param) in self._indices

    def initial_value(self, index: int, param: nn.Parameter) -> torch.Tensor:
        return self._loaded.pop(index) if index in self._loaded else self._initial(index, param)

    def give_back(self) -> dict[int, str]:
        """The engine ends and never started: parameters that have their values are the program's again; the others' names by address."""
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
            raise ConfigError("the parameter is not one of this engine's")
        return self.values.read(state)

    def num_updates(self, param: torch.Tensor) -> int:
        """That have been made of a parameter; of those under way nothing is known."""
        state = self.registry.find(param)
        return max(chunk.steps[state.index] for chunk in self.registry.chunks_of(state))

    def is_held(self, param: torch.Tensor) -> bool:
        """Whether the program may read and change the parameter now, as inside `gathered` or its module's forward."""
        return self._gate.has_started and self.registry.params[self._indices[id(param)]].num_holders > 0

    @uninterrupted
    def read_weight(self, param: torch.Tensor) -> torch.Tensor:
        """A parameter's value, whole, on the CPU, in its dtype on the device. Every rank must call it."""
        self._gate.enter("state_dict()")
        index = self._indices[id(param)]
        if not self._gate.has_started:
            if index not in self._loaded:
                if is_here(param):
                    return param.detach().to("cpu", self._dtypes[index], copy=True)
                self._loaded[index] = self._initial(index, param).cpu()
            return self._loaded[index].to(self._dtypes[index], copy=True).reshape(param.shape)
        if self.is_held(param):
            return param.detach().to("cpu", copy=True)
        self.cycle.refuse_half_updated("state_dict()")
        return self.values.read(self.registry.params[index], weight_only=True)["weight"]

    @uninterrupted
    def write_weight(self, param: torch.Tensor, value: torch.Tensor) -> None:
        """Give a parameter a value, of its shape; moments stay. Every rank must call it; rank 0's value counts."""
        value = value.detach().reshape(-1).to("cpu", copy=True)
        self._ranks.broadcast_(value.view(torch.uint8))
        self.give(param, value)

    @uninterrupted
    def give(self, param: torch.Tensor, value) -> None:
        """As `write_weight`, of what is the same on every rank: anything whose slices are 1-D tensors on the CPU."""
        self._gate.enter("a new value of a weight")
        index = self._indices[id(param)]
        if not self._gate.has_started:
            if is_here(param):  # what the program changes afterwards counts
                with torch.no_grad():
                    param.copy_(value[: param.numel()].view(param.shape))
            else:
                self._loaded[index] = value
            return
        self.cycle.refuse_half_updated("new weights", change=True)
        state = self.registry.params[index]
        if not self.calls.frames and not autograd_runs():
            self.calls.release_escaped()
        if self.weights.is_held(self.registry.span_of(state)):
            raise UsageError(f"{state.name} is given a value while the model runs or inside infinity.gathered")
        self.values.write_weight(state, value)
        for chunk in self.registry.chunks_of(state):
            if not chunk.weights_home.is_device and not chunk.on_device:
                self.cycle.updates.make_stale(chunk)
        note_change(state)

    @contextlib.contextmanager
    def gathered(self, params: Iterable[torch.Tensor]):
        self.cycle.refuse_half_updated("infinity.gathered", change=True)
        states = [self.registry.find(param) for param in params if param.numel() and param.is_floating_point()]
        if None in states:
            raise ConfigError("infinity.gathered: a parameter is not one of this engine's")
        before: dict[SpanState, torch.Tensor] = {}
        try:
            self._gather(dict.fromkeys(self.registry.span_of(state) for state in states), before)
            with self.calls.saved_tensors():
                yield
        finally:
            self._adopt(before)

    @contextlib.contextmanager
    def gathered_first(self, params: Iterable[torch.Tensor], device: torch.device):
        """As `gathered`, before the engine has started. The block changes initial values, in the dtype that each parameter was made with."""
        params = [param for param in params if param.numel() and param.is_floating_point()]
        if not all(map(self.manages, params)):
            raise ConfigError("infinity.gathered: a parameter is not one of this engine's")
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
            self._gate.check_open()
            if not self._gate.has_started:
                for param, home in zip(params, homes):
                    self._take_first(param, home)
                self._first.send_away()

    def _take_first(self, param: nn.Parameter, home: torch.device) -> None:
        """Every rank takes rank 0's value. The value goes back to the device where the parameter was made."""
        if self._ranks.world > 1:
            value = param.detach().to("cpu", copy=True)
            self._ranks.broadcast_(value.view(-1).view(torch.uint8))
            param.data = value
        param.data = param.data.to(home)

    @uninterrupted
    def _gather(self, spans: Iterable[SpanState], before: dict[SpanState, torch.Tensor]) -> None:
        """Hold them, and note what they are before the program changes them."""
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
            self._gate.check_open()
        for span, value in before.items():
            try:
                span.written()
            finally:
                for state in span.params:
                    state.version = state.counter._version
                    state.release()
                self.values.adopt(span, (), value)
                self.weights.release(span)

    # What parameters call: [Note: parameters with two classes] in parameters.py.

    def name_of(self, param: nn.Parameter) -> str:
        return self._named[self._indices[id(param)]][0]

    def may_compute(self, params: list[nn.Parameter]) -> bool:
        """Whether the program is where it may read parameters that nothing holds: in one of this engine's ops."""
        return self._gate.has_started and self.calls.may_compute(list(map(self.registry.find, params)))

    def compute(self, params: list[nn.Parameter], func, args: tuple, kwargs: dict):
        """func(*args, **kwargs), for which these parameters are held."""
        return self.calls.compute(list(map(self.registry.find, params)), func, args, kwargs)

    def look_at_gradients(self):
        """Inside the block a backward pass only returns gradients."""
        return self.cycle.autograd_grad.running(scaled=self.cycle.scaler is not None) if self._gate.has_started else contextlib.nullcontext()

    def departed_gradient(self, param: nn.Parameter) -> torch.Tensor | None:
        """In a backward pass: the sign of a parameter's gradient that has left, or None."""
        if not self._gate.has_started or not self.cycle.state.in_backward:
            return None
        return self.cycle.param_grads.departed(self.registry.find(param))

    def take(self, param: nn.Parameter, data: torch.Tensor) -> None:
        """The program puts other data into a parameter that is held."""
        state = self.registry.find(param)
        state.put(data)


def is_here(param: nn.Parameter) -> bool:
    """Whether it has elements of its own; those that `infinity.init` has sent away share one, which is no number."""
    here = param.untyped_storage().nbytes() >= param.numel() * param.element_size()
    return here and (param.numel() > 1 or not param.isnan().item())
