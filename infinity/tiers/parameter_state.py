"""State of one parameter in an engine, and the data that the parameter points to.

Knows the parameter, the placeholder and the class of the parameter. Must not know chunks, or the place of the value's bytes.
"""

from __future__ import annotations

import torch
from torch._C import DisableTorchFunctionSubclass

from infinity.errors import UsageError
from infinity.formats.dtypes import as_integers
from infinity.model.autograd_state import num_accumulated_hooks, num_gradient_hooks, overwrite
from infinity.model.parameters import classes_of, set_data
from infinity.model.state_dict import DepartedGradient


def contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    """The stride of a contiguous tensor of this shape, in elements, as torch counts it."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * max(shape[dim], 1)
    return tuple(strides)


class ParameterState:
    """State of one parameter. The registry finds the state by the parameter."""

    def __init__(self, index: int, name: str, param: torch.nn.Parameter, bank: torch.Tensor, *, trainable: bool):
        """bank: 1-D, all NaN, of the parameter's dtype on the device. Element `index` is the placeholder's only element."""
        placeholder = bank[index].expand(param.shape)
        self.index = index
        self.name = name
        self.param = param
        self.held_class, self.unheld_class = classes_of(type(param))
        self.num_holders = 0  # readers that may use the value now, see [Note: parameters with two classes] in parameters.py
        self.counter = param.detach()  # shares the count of writes with the parameter, but no functions
        set_data(self.counter, placeholder)
        self.shape, self.stride = param.shape, contiguous_stride(param.shape)
        self.numel = param.numel()
        self.trainable = trainable
        self.placeholder = placeholder
        # The bits of the placeholder, read without a torch operation. Such an operation would release the GIL and wait for the GIL again.
        self._bits = as_integers(bank).numpy() if bank.device.type == "cpu" else None
        self._untouched = self._bits[index].item() if self._bits is not None else None
        self.view: torch.Tensor | None = None  # of the span's storage, made when the span is first HOME
        self.version = 0  # write count of the parameter at the last arrival or departure
        self.group: int | None = None  # index of the optimizer's parameter group
        self.arrivals = 0  # gradients in this backward pass
        self.arrived_last: dict[int, int] = {}  # in the previous step, by the number of the backward pass
        self.expected: float = 1  # gradients that this backward pass brings; infinite if unknown
        self.touched = 0  # uses by ops in the forward passes of this step, in training
        self.touched_last: dict[int, int] = {}  # in the previous step, by the number of the backward pass
        self.written_in_forward = False
        self.departed = DepartedGradient(placeholder)

    def expect(self, num_gradients: float) -> None:
        """A backward pass begins. num_gradients: of the parameter in this pass; infinite if unknown."""
        self.arrivals, self.expected = 0, num_gradients

    def hold(self) -> None:
        """One more reader may use and change the value. The span is HOME."""
        self.num_holders += 1
        if self.num_holders == 1:
            self.param.__class__ = self.held_class

    def release(self) -> None:
        self.num_holders -= 1
        assert self.num_holders >= 0, self
        if not self.num_holders:
            self.param.__class__ = self.unheld_class

    def leave(self) -> None:
        """From now on, the value is in a record, or the parameter has no value."""
        self.num_holders = 0
        self.param.__class__ = self.unheld_class
        self.point_to(self.placeholder)

    def point_to(self, data: torch.Tensor) -> None:
        with DisableTorchFunctionSubclass():
            set_data(self.param, data)
        self.version = self.counter._version

    @property
    def is_written(self) -> bool:
        """Whether the parameter was written to in place since the last arrival or departure."""
        return self.counter._version != self.version

    @property
    def has_hooks(self) -> bool:
        """Whether the program has hooks on the gradients. The engine itself has one hook of each kind."""
        return num_gradient_hooks(self.param) > 1 or self.has_gradient_hooks

    @property
    def has_gradient_hooks(self) -> bool:
        """Whether the program has hooks on accumulated gradients."""
        return num_accumulated_hooks(self.param) > 1

    def check_untouched(self) -> None:
        """Raise UsageError if the placeholder was written to or replaced. This is the last guard, for code in C that passes all others.

        The caller switches torch functions of classes off."""
        placeholder = self.placeholder
        replaced = self.param.data_ptr() != placeholder.data_ptr()
        if not replaced and not self.is_written:
            if self._bits is None or self._bits[self.index] == self._untouched:
                return
        placeholder.as_strided((), ()).fill_(float("nan"))
        self.point_to(placeholder)
        raise UsageError(
            f"{self.name} was {'replaced' if replaced else 'written to'} while it was not on the device, where it is only "
            f"a placeholder. Change values inside `with infinity.gathered([parameter]):`."
        )

    def take_replaced(self) -> None:
        """Make data that the program put into a HOME parameter, as with `set_`, the value of the parameter.

        Raises UsageError for data of another shape, dtype or device.
        """
        view = self.view
        with DisableTorchFunctionSubclass():
            data = self.param.detach()
            if data.data_ptr() == view.data_ptr() and (data.shape, data.dtype, data.stride()) == (view.shape, view.dtype, view.stride()):
                return
            set_data(self.param, view)
        self.put(data)

    def put(self, data: torch.Tensor) -> None:
        """Make data the value of a HOME parameter. This counts as a write. Raises UsageError for another shape, dtype or device."""
        view = self.view
        if data.shape != view.shape:
            raise UsageError(
                f"{self.name} was given data of shape {tuple(data.shape)}, as by resize_token_embeddings; the engine keeps the shape "
                f"{tuple(view.shape)}. Resize the model first: before infinity.offload(model, config), or inside `with "
                f"infinity.init(config):`."
            )
        if (data.dtype, data.device) != (view.dtype, view.device):
            raise UsageError(
                f"{self.name} was given data of shape {tuple(data.shape)}, {data.dtype} on {data.device}, as by model.to() or "
                f"model.float(); the engine keeps it as {tuple(view.shape)}, {view.dtype} on {view.device}. Choose the dtype "
                f"and the device in infinity.Config."
            )
        overwrite(view, data, self.counter)

    def __repr__(self):
        return f"ParameterState({self.name}, {tuple(self.shape)})"
