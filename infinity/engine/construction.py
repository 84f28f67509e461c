"""Construction of models that no process could hold: `infinity.init`.

Knows parameters as they are made, a window of each memory in which they are made, and a scratch file. Must not know chunks or
tiers: once the model stands, the engine asks for each parameter's initial value and lays out the records.
"""

# [Note: parameters under construction]
# A parameter is noticed when it is registered, or when a module that brings it along is. The newest parameters stay at home;
# past the window of the memory that they are in, the oldest go to a scratch file (each rank keeps its 1/world slice there) and leave
# a placeholder, one element of NaN expanded to the shape. A TorchFunctionMode sees every operation, `.data` and deepcopy, and brings back
# whatever they touch, so parents may initialise their children again, and the values, and the random numbers drawn, are
# those of a plain construction. What has come back has left its place in the file to the next one that goes, so that the file holds
# no more than what is away. A parameter whose storage somebody else still refers to is not sent away: a write through that reference
# would be lost.

from __future__ import annotations

import collections
import contextlib
import errno
import tempfile
import weakref
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

import aio_ext
from infinity.config import Config
from infinity.engine.engine import Engine, cut_large_layers
from infinity.errors import SwapError, UsageError
from infinity.sizes import format_bytes
from infinity.system.capacity import device_of, gauge_of, host_free_nbytes
from infinity.system.ranks import Ranks
from infinity.system.swap_errors import changed_error

MIN_WINDOW_NBYTES = 1 << 30
WINDOW_SHARES = {"cpu": 1 / 16, "cuda": 2 / 5}  # of what is free there: the engine starts, and takes most of a host, while they are full

_MOST_A_CALL = 1 << 30  # bytes

# What is true of a placeholder, too.
_METADATA = frozenset(
    "shape dtype device layout requires_grad grad grad_fn is_leaf ndim names is_sparse is_cuda is_cpu is_meta is_quantized "
    "_backward_hooks _version name itemsize nbytes".split()
)
_METADATA_FUNCTIONS = frozenset(
    "size numel nelement dim ndimension is_floating_point is_complex __hash__ requires_grad_ register_hook __len__ "
    "element_size register_post_accumulate_grad_hook has_names is_inference _is_view is_pinned".split()
)


@contextlib.contextmanager
def init(config: Config | None = None, *, window: int | None = None):
    """Modules built inside the block belong to an engine; no process ever holds more than `window` bytes of their parameters
    in host memory or on the device (and the module under construction): by default a sixteenth of what is free in the first and two
    fifths of what is free on the second, at least 1 GiB.

    With the same seed the weights are those of a plain construction, bit for bit. Every rank must build the same modules.
    """
    config = config or Config()
    device = device_of(config.device)
    with Ranks(device).joined() as ranks:
        builder = _Builder(config, ranks, _windows(device, ranks) if window is None else {"cpu": window, device.type: window})
        try:
            with builder, ranks.at("infinity.init"):
                yield
                for root in builder.roots():
                    if cut_large_layers(root, config, ranks):
                        builder.forget_unused()
        except BaseException as error:
            ranks.report(error, "infinity.init: ")
            raise
        for root in builder.roots():
            if any(p.is_floating_point() and p.numel() for p in root.parameters()):
                Engine(root, config, builder.value, ranks)


def _windows(device: torch.device, ranks: Ranks) -> dict[str, int]:
    """Bytes by kind of device, the same on all ranks: what leaves, leaves on all of them."""
    free = {"cpu": host_free_nbytes() // ranks.num_local}
    if gauge := gauge_of(device):
        free[device.type] = gauge.free_nbytes()
    least = ranks.min_(torch.tensor(list(free.values()))).tolist()
    return {kind: max(MIN_WINDOW_NBYTES, int(WINDOW_SHARES[kind] * nbytes)) for kind, nbytes in zip(free, least)}


class _Home(NamedTuple):
    """A parameter that has its values: how many bytes, in the memory of which kind of device."""

    param: nn.Parameter
    kind: str
    nbytes: int


def _home_of(param: nn.Parameter) -> _Home:
    return _Home(param, param.device.type, param.numel() * param.element_size())


class _Away:
    """A parameter in the scratch file: [offset, offset + nbytes) of it is its place."""

    __slots__ = ("crc32c", "dtype", "nbytes", "numel", "offset", "placeholder", "shape")

    def __init__(self, param: nn.Parameter, offset: int, nbytes: int):
        self.shape, self.dtype, self.numel = param.shape, param.dtype, param.numel()
        self.offset, self.nbytes = offset, nbytes
        self.crc32c: int | None = None  # of this rank's slice, where checksums are wanted
        self.placeholder = torch.full((), float("nan"), dtype=param.dtype, device=param.device)

    def is_in(self, param: nn.Parameter) -> bool:
        """Whether the parameter still holds the placeholder, and nobody gave it other data, as `set_` does, which no mode sees."""
        return param.data_ptr() == self.placeholder.data_ptr()


class _Builder(TorchFunctionMode):
    def __init__(self, config: Config, ranks: Ranks, windows: dict[str, int]):
        super().__init__()
        self.config = config
        self.ranks = ranks
        self.windows = windows
        self.file = None
        self._home: dict[int, _Home] = {}  # by identity, oldest first
        self._away: dict[int, tuple[nn.Parameter, _Away]] = {}
        self._home_nbytes = collections.Counter()  # by kind of device
        self._free_places = collections.defaultdict(list)  # offsets in the file, by size in bytes
        self._file_nbytes = 0
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._children: set[int] = set()
        self._busy = False

    def __enter__(self):
        self._hooks = [
            register_module_parameter_registration_hook(self._parameter_registered),
            register_module_module_registration_hook(self._module_registered),
        ]
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        for hook in self._hooks:
            hook.remove()
        for param, away in list(self._away.values()):
            if not away.is_in(param):
                self._forget(id(param))
                self._come_home(param)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._away and not self._busy and not _is_metadata(func):
            self._bring_back([*args, *kwargs.values()])
        return func(*args, **kwargs)

    def roots(self) -> list[nn.Module]:
        """The modules that are no other's child, oldest first."""
        alive = [reference() for reference in self._modules.values()]
        return [module for module in alive if module is not None and id(module) not in self._children]

    def forget_unused(self) -> None:
        """Let go of parameters that are no longer any module's."""
        used = {id(param) for root in self.roots() for param in root.parameters()}
        for key in [key for key in (*self._home, *self._away) if key not in used]:
            self._leave_home(key)
            self._forget(key)

    def value(self, index: int, param: nn.Parameter) -> torch.Tensor:
        """The initial value of a parameter, 1-D, on the CPU or where the parameter was made. Every rank must ask in the same order."""
        away = self._forget(id(param))
        self._leave_home(id(param))
        if away is None:
            return param.detach().reshape(-1)
        if not away.is_in(param) or not away.placeholder.isnan().item():
            raise UsageError(
                f"a parameter of shape {tuple(param.shape)} was changed after `with infinity.init(...)` had ended, when it was "
                f"only a placeholder. Initialise inside the block, or use `with infinity.gathered([parameter]):`."
            )
        return self._load(away)

    def _parameter_registered(self, module, name, param):
        self._note_module(module)
        if param is not None:
            self._notice(param)
            self._shrink(keep={id(param)})

    def _module_registered(self, module, name, child):
        self._note_module(module)
        if child is not None:
            self._note_module(child)
            self._children.add(id(child))
            for param in child.parameters():
                self._notice(param)
            self._shrink()

    def _note_module(self, module: nn.Module) -> None:
        reference = self._modules.get(id(module))
        if reference is None or reference() is not module:
            self._children.discard(id(module))  # an address used again
            self._modules[id(module)] = weakref.ref(module)

    def _notice(self, param: nn.Parameter) -> None:
        home = self._home.get(id(param))
        if home is not None:
            if home != _home_of(param):  # its data are others now, such as after `module.to(...)`
                self._come_home(param)
            return
        if id(param) in self._away or not param.is_floating_point() or not param.numel():
            return
        for original, away in list(self._away.values()):
            if away.is_in(param):  # nn.Parameter(another) asks no mode for the other's data
                self._bring_back([original])
                param.data = original.data.reshape(param.shape)
        self._come_home(param)

    def _come_home(self, param: nn.Parameter) -> None:
        self._leave_home(id(param))
        home = self._home[id(param)] = _home_of(param)
        self._home_nbytes[home.kind] += home.nbytes

    def _forget(self, key: int) -> _Away | None:
        """A parameter is in the file no longer; until the next one leaves, its bytes can still be read there."""
        _, away = self._away.pop(key, (None, None))
        if away is not None:
            self._free_places[away.nbytes].append(away.offset)
        return away

    def _leave_home(self, key: int) -> None:
        home = self._home.pop(key, None)
        if home is not None:
            self._home_nbytes[home.kind] -= home.nbytes

    def _shrink(self, keep: Collection[int] = ()) -> None:
        """Send the oldest away, but for `keep`, by identity, until the windows hold the rest."""
        full = {kind for kind, window in self.windows.items() if self._home_nbytes[kind] > window}  # where there is none, none leave
        for key, home in list(self._home.items()) if full else ():
            if home.kind in full and key not in keep and self._may_leave(home.param):
                self._send_away(key, home.param)
                if self._home_nbytes[home.kind] <= self.windows[home.kind]:
                    full.discard(home.kind)

    def _may_leave(self, param: nn.Parameter) -> bool:
        """Whether no rank still refers to the parameter's storage: garbage is collected at other times on other ranks, and
        what one of them sends away, all must, for they bring it back together."""
        return bool(self.ranks.min_(torch.tensor([int(_unshared(param))])).item())

    def _send_away(self, key: int, param: nn.Parameter) -> None:
        self._busy = True
        try:
            numel = -(-param.numel() // self.ranks.world)
            nbytes = numel * param.element_size()
            if not (places := self._free_places[nbytes]):
                places.append(self._file_nbytes)
                self._file_nbytes += nbytes
            away = _Away(param, places[-1], nbytes)
            begin = self.ranks.rank * numel
            part = param.detach().reshape(-1)[begin : begin + numel].cpu().contiguous()
            if self.config.checksums:
                away.crc32c = aio_ext.crc32c(_memory(part))
            try:
                _transfer(self._scratch(), "write", away.offset, part)
            except OSError as error:
                raise SwapError(
                    error.errno,
                    f"the scratch file for parameters under construction could not take {format_bytes(part.nbytes)} more; free "
                    f"some space or name another directory in `nvme`",
                    str(self.config.nvme[0]),
                ) from error
            places.pop()
            param.data = away.placeholder.expand(param.shape)
            self._away[key] = (param, away)
            self._leave_home(key)
        finally:
            self._busy = False

    def _bring_back(self, values) -> None:
        params = {id(param): param for param in _parameters_in(values)}
        touched = [param for key, param in params.items() if key in self._away]
        for param in touched:
            self._busy = True
            try:
                _, away = self._away[id(param)]
                if away.is_in(param):
                    param.data = self._load(away).to(away.placeholder.device).reshape(away.shape)
                self._forget(id(param))
            finally:
                self._busy = False
            self._notice(param)
        if touched:
            self._shrink(keep=params)

    def _load(self, away: _Away) -> torch.Tensor:
        numel = -(-away.numel // self.ranks.world)
        part = torch.zeros(numel, dtype=away.dtype)
        begin = self.ranks.rank * numel
        count = max(0, min(numel, away.numel - begin))
        what = f"{self.ranks.name}, " if self.ranks.world > 1 else ""
        what += f"a parameter of shape {tuple(away.shape)} under construction: "
        try:
            _transfer(self._scratch(), "readinto", away.offset, part[:count])
        except OSError as error:
            text = f"{what}its scratch file could not be read ({error.strerror}); see dmesg, and name another directory in `nvme`"
            raise SwapError(error.errno, text, str(self.config.nvme[0])) from error
        if away.crc32c not in (None, aio_ext.crc32c(_memory(part[:count]))):
            raise changed_error(what, f", from offset {away.offset} of a scratch file on", self.config.nvme[0])
        return self.ranks.all_gather_slices(part.view(torch.uint8)).view(away.dtype)[: away.numel]

    def _scratch(self):
        if self.file is None:
            path = self.config.nvme[0]
            if self.config.creates_nvme:
                path.mkdir(exist_ok=True)
            self.file = tempfile.TemporaryFile(dir=path, buffering=0)  # has no name: gone with the process
        return self.file


def _transfer(file, what: str, offset: int, part: torch.Tensor) -> None:
    """`write` to a file without a buffer or `readinto` from it, all of part, 1-D: the kernel moves at most 2 GiB a call."""
    memory = _memory(part)
    file.seek(offset)
    while memory:
        moved = getattr(file, what)(memory[:_MOST_A_CALL])
        if not moved:
            raise OSError(errno.ENOSPC if what == "write" else errno.EIO, f"{what} of {len(memory)} bytes moved none")
        memory = memory[moved:]


def _memory(part: torch.Tensor) -> memoryview:
    """The bytes of a 1-D tensor."""
    return memoryview(part.view(torch.uint8).numpy())


def _is_metadata(func) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") in _METADATA
    return name in _METADATA_FUNCTIONS


def _parameters_in(values):
    for value in values:
        if isinstance(value, nn.Parameter):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _parameters_in(value)
        elif isinstance(value, dict):
            yield from _parameters_in(value.values())


def _unshared(param: nn.Parameter) -> bool:
    """Whether the parameter alone refers to its storage."""
    storage = param.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) <= 2  # the parameter's and the one just made

