"""What the engine knows of one parameter, and the data that the parameter points to.

Knows the parameter, its placeholder and its class. Must not know chunks, or where the bytes of its value are.
"""

from __future__ import annotations

import torch
from torch._C import DisableTorchFunctionSubclass

from infinity.errors import UsageError
from infinity.formats.dtypes import as_integers
from infinity.model.autograd_state import num_accumulated_hooks, num_gradient_hooks, overwrite
from infinity.model.parameters import classes_of, set_data
from infinity.model.state_dict import DepartedGradient


class ParameterState:
    """What the engine knows of one parameter; the registry finds it by the parameter itself."""

    def __init__(self, index: int, name: str, param: torch.nn.Parameter, bank: torch.Tensor, *, trainable: bool):
        """bank: 1-D, all NaN, of the parameter's dtype on the device. Element `index` is the placeholder's only element."""
        placeholder = bank[index].expand(param.shape)
        self.index = index
        self.name = name
        self.param = param
        self.held_class, self.unheld_class = classes_of(type(param))
        self.num_holders = 0  # whoever may read it now, see [Note: parameters with two classes] in parameters.py
        self.counter = param.detach()  # shares the count of writes with the parameter, and none of its functions
        set_data(self.counter, placeholder)
        self.shape, self.stride = param.shape, torch.empty(param.shape, device="meta").stride()
        self.numel = param.numel()
        self.trainable = trainable
        self.placeholder = placeholder
        # Its bits, read without a torch operation, which would let go of the GIL and wait to have it back.
        self._bits = as_integers(bank).numpy() if bank.device.type == "cpu" else None
        self._untouched = self._bits[index].item() if self._bits is not None else None
        self.view: torch.Tensor | None = None  # of the span's storage, made when it is first home
        self.version = 0  # of the parameter when it last came home or left
        self.group: int | None = None  # index of the optimizer's parameter group
        self.arrivals = 0  # gradients in this backward pass
        self.arrived_last: dict[int, int] = {}  # in those of the step before, by number
        self.expected: float = 1  # gradients that this backward pass brings, as far as is known, else infinite
        self.touched = 0  # uses by ops in this step's forward passes, while it trains
        self.touched_last: dict[int, int] = {}  # in the step before, by backward pass
        self.written_in_forward = False
        self.departed = DepartedGradient(placeholder)

    def expect(self, num_gradients: float) -> None:
        """A backward pass begins that brings so many gradients of it, infinite if nobody knows."""
        self.arrivals, self.expected = 0, num_gradients

    def hold(self) -> None:
        """One more may read and change it; its span is home."""
        self.num_holders += 1
        if self.num_holders == 1:
            self.param.__class__ = self.held_class

    def release(self) -> None:
        self.num_holders -= 1
        assert self.num_holders >= 0, self
        if not self.num_holders:
            self.param.__class__ = self.unheld_class

    def leave(self) -> None:
        """Its value is in a record from now on, or nowhere."""
        self.num_holders = 0
        self.param.__class__ = self.unheld_class
        self.point_to(self.placeholder)

    def point_to(self, data: torch.Tensor) -> None:
        with DisableTorchFunctionSubclass():
            set_data(self.param, data)
        self.version = self.counter._version

    @property
    def is_written(self) -> bool:
        """Whether it was written to in place since it last came home or left."""
        return self.counter._version != self.version

    @property
    def has_hooks(self) -> bool:
        """Whether the program looks at its gradients, or changes them, beside the engine, which has one hook of each kind."""
        return num_gradient_hooks(self.param) > 1 or self.has_gradient_hooks

    @property
    def has_gradient_hooks(self) -> bool:
        """Whether the program looks at accumulated gradients."""
        return num_accumulated_hooks(self.param) > 1

    def check_untouched(self) -> None:
        """The last guard, for what went by all others, such as code in C: raise UsageError if somebody wrote to the placeholder or put
        something else in its place. Called with torch functions of classes switched off."""
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
        """Where the program has put other data into the parameter, which is home, as with `set_`, make that its value.

        Raises UsageError if it cannot be.
        """
        view = self.view
        with DisableTorchFunctionSubclass():
            data = self.param.detach()
            if data.data_ptr() == view.data_ptr() and (data.shape, data.dtype, data.stride()) == (view.shape, view.dtype, view.stride()):
                return
            set_data(self.param, view)
        self.put(data)

    def put(self, data: torch.Tensor) -> None:
        """Make other data the value of the parameter, which is home, counted as a write to it. Raises UsageError if it cannot be."""
        view = self.view
        if data.shape != view.shape:
            raise UsageError(
                f"{self.name} was given data of shape {tuple(data.shape)}, as by resize_token_embeddings; the engine has laid it out as "
                f"{tuple(view.shape)}, for good. Resize the model first: before infinity.offload(model, config), or inside `with "
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
