"""Draws the values of initialisers later, and with several threads. The values and the generator have torch's own bits.

Knows tensors and torch's default generators. Must not know modules, parameters or the caller.
"""

# [Note: values drawn later]
# `normal_`, `uniform_`, `fill_` and `zero_` overwrite a tensor by their arguments and the next numbers of a generator. The generator's
# state, 5 KiB, therefore determines the values. On the CPU the generator advances without drawing (`_mt19937.c`), 10 to 40 times as fast as
# torch draws in one thread. A module's own initialisation that the parent overwrites is never drawn. When the values are needed, several
# threads draw a stripe each, from the generator's state at the stripe's begin. Each element takes one 32-bit number, in order. Normal
# numbers are made 16 at a time, except an odd end. torch draws this end at once, which gives the generator's state after the end:
# [Note: the random numbers of a tiled layer] in tiled_layers.py. No version of torch guarantees this order. `_is_as_torch` therefore
# compares a short draw in both ways, once per process and dtype, and without equality nothing is drawn later. On CUDA torch draws at once,
# and again if needed.

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from infinity.model import _mt19937
from infinity.model.tiled_layers import NORMAL_BLOCK
from infinity.system import host_bytes

STRIPE_NUMEL = 1 << 21  # with a state of 5 KiB each: an 800th of bf16 values
_FIRST_NBYTES = 4 << 10  # are looked at before the rest

_aten = torch.ops.aten
_DRAWS = {_aten.normal_.default: "normal_", _aten.uniform_.default: "uniform_"}
_FILLS = {_aten.zero_.default: "zero_", _aten.fill_.Scalar: "fill_"}
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # dtypes whose elements take one number each


class Drawn:
    """The values of `func(*args)`, a method of tensors that overwrites any values of one shape. states: of the generator, at each stripe's
    begin.
    """

    __slots__ = ("_args", "_device", "_name", "_shape", "_states", "_stripe_numel")

    def __init__(self, name: str, args: tuple, shape: torch.Size, device: torch.device, states: list[torch.Tensor], stripe_numel: int):
        self._name, self._args, self._shape, self._device = name, args, shape, device
        self._states, self._stripe_numel = states, stripe_numel

    @torch.no_grad()
    def write(self, out: torch.Tensor, num_threads: int) -> None:
        """Write the values to a 1-D tensor on their device."""
        host_bytes.work(out.nbytes, self._write_all, out, num_threads)

    def _write_all(self, out: torch.Tensor, num_threads: int) -> None:
        if len(self._states) < 2 or num_threads < 2:
            for index in range(max(1, len(self._states))):
                self._write(out, index)
            return
        inference = torch.is_inference_mode_enabled()

        def write(index: int) -> None:
            with torch.inference_mode(inference), torch.no_grad():
                self._write(out, index)

        with ThreadPoolExecutor(min(num_threads, len(self._states)), "infinity-draw") as pool:
            list(pool.map(write, range(len(self._states))))

    def _write(self, out: torch.Tensor, index: int) -> None:
        if not self._states:
            getattr(out, self._name)(*self._args)
            return
        generator = torch.Generator(self._device)
        generator.set_state(self._states[index])
        part = out.view(self._shape)
        if self._device.type == "cpu":
            begins = range(0, _last_begin(out.numel(), self._stripe_numel) + 1, self._stripe_numel)
            part = out[begins[index] : begins[index + 1] if index + 1 < len(begins) else None]
        getattr(part, self._name)(*self._args, generator=generator)


def drawn_by(func, args: tuple, kwargs: dict, target: torch.Tensor):
    """(result of func, which overwrites target; a Drawn of the last values). The Drawn is None, and target has its values, if drawing later
    is not possible.
    """
    recorder = _Recorder(target)
    try:
        with recorder:
            result = func(*args, **kwargs)
    except BaseException:
        recorder.settle()
        raise
    return result, recorder.drawn


def drawn_zeros(values: torch.Tensor) -> Drawn | None:
    """The values as a Drawn if all bits are zero, otherwise None. The first 4 KiB usually decide."""
    if not values.is_contiguous():
        return None
    bits = values.detach().reshape(-1).view(torch.uint8)
    if bits[:_FIRST_NBYTES].any() or bits.any():
        return None
    return Drawn("zero_", (), values.shape, values.device, [], 1)


class _Recorder(TorchDispatchMode):
    """Watches the operations on one tensor, and defers the last draw."""

    def __init__(self, target: torch.Tensor):
        super().__init__()
        self.drawn: Drawn | None = None
        self._target = target

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        drawn = self._draw(func, args[1:], kwargs) if args and _is_whole(args[0], self._target) else None
        if drawn is None:
            self.settle()
            return func(*args, **kwargs)
        self.drawn = drawn
        return args[0]

    def settle(self) -> None:
        """Write the target's values now."""
        if self.drawn is not None:
            self.drawn.write(self._target.detach().view(-1), 1)
            self.drawn = None

    def _draw(self, func, args: tuple, kwargs: dict) -> Drawn | None:
        target, name = self._target, _DRAWS.get(func) or _FILLS.get(func)
        if name is None or kwargs.get("generator") is not None or target.dtype not in _DTYPES:
            return None
        func(target.detach().view(-1)[:0], *args)  # raises for invalid arguments
        if func in _FILLS:
            return Drawn(name, args, target.shape, target.device, [], 1)
        if target.device.type == "cuda":
            state = torch.cuda.default_generators[target.device.index].get_state()
            func(target, *args)
            return Drawn(name, args, target.shape, target.device, [state], 1)
        if target.numel() < NORMAL_BLOCK or not _is_as_torch(target.dtype):
            return None
        passed = torch.default_generator, name, args, target.numel(), target.dtype, STRIPE_NUMEL
        return Drawn(name, args, target.shape, target.device, host_bytes.work(target.nbytes, _pass_by, *passed) or [], STRIPE_NUMEL)


def _is_whole(tensor, target: torch.Tensor) -> bool:
    """Whether a tensor covers the whole target: the same, detached, or viewed."""
    same = isinstance(tensor, torch.Tensor) and tensor.device == target.device and tensor.dtype is target.dtype
    return same and tensor.data_ptr() == target.data_ptr() and tensor.shape == target.shape and tensor.is_contiguous()


def _last_begin(numel: int, stripe_numel: int) -> int:
    """The begin of the last stripe, which has at least one whole block of normal numbers."""
    return max(0, numel - NORMAL_BLOCK) // stripe_numel * stripe_numel


def _pass_by(generator: torch.Generator, name: str, args: tuple, numel: int, dtype: torch.dtype, stripe_numel: int) -> list[torch.Tensor]:
    """Advance a generator past a draw of numel elements. Returns the states at the begins of stripes."""
    last, end, state, states = _last_begin(numel, stripe_numel), _last_begin(numel, NORMAL_BLOCK), generator.get_state(), []
    for begin in range(0, last + 1, stripe_numel):
        states.append(state.clone())
        _mt19937.advance(state.numpy(), min(stripe_numel, end - begin))
    generator.set_state(state)
    getattr(torch.empty(numel - end, dtype=dtype, device="cpu"), name)(*args, generator=generator)
    return states


@functools.cache
def _is_as_torch(dtype: torch.dtype) -> bool:
    """Whether this torch draws in the order of [Note: values drawn later]."""
    for name in _DRAWS.values():
        for numel in (NORMAL_BLOCK, 40 * NORMAL_BLOCK, 60 * NORMAL_BLOCK + 5):
            generator, args = torch.Generator(), (0.25, 2.0)
            expected, found = torch.empty(2, numel, dtype=dtype, device="cpu")
            start = generator.get_state()
            states = _pass_by(generator, name, args, numel, dtype, 16 * NORMAL_BLOCK)
            after = generator.get_state()
            Drawn(name, args, found.shape, found.device, states, 16 * NORMAL_BLOCK).write(found, 1)
            getattr(expected, name)(*args, generator=generator.set_state(start))
            if not torch.equal(generator.get_state(), after) or not torch.equal(expected.view(torch.uint8), found.view(torch.uint8)):
                return False
    return True
