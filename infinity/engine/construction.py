"""Construction of models that no process could hold: `infinity.init`.

Knows parameters as they are made, a window of each memory in which they are made, and where they are when they are away. Must not know
chunks or tiers: once the model stands, the engine asks for each parameter's initial value and lays out the records.
"""

# [Note: parameters under construction]
# A parameter is noticed when it is registered, or when a module that brings it along is. A TorchFunctionMode sees every operation, `.data`
# and deepcopy. What an initialiser draws is not drawn but noted ([Note: values drawn later] in infinity/model/deferred_init.py): the parameter is
# away at once, and its values are first drawn for the record that they are to be in. What is mapped from a file, as transformers'
# from_pretrained leaves it, stays there, and from when the first of it is noticed the kernel reads the file. Of the others the newest
# stay at home; past the window of the memory that they are in, the oldest go to a scratch file (each rank keeps its 1/world slice there).
#
# What is away leaves a placeholder, one element of NaN expanded to the shape. Whatever touches it brings it back, but for questions about
# its shape and kind, and for operations that give it new values anyway. So parents may initialise their children again, and the
# values, and the random numbers drawn, are those of a plain construction. What has come back has left its place in the file to the next one
# that goes, so that the file holds no more than what is away. A parameter whose storage somebody else still refers to is not
# sent away: a write through that reference would be lost.

from __future__ import annotations

import collections
import contextlib
import os
import weakref
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from infinity.config import Config
from infinity.engine.engine import Engine, cut_large_layers
from infinity.engine.sizing import HOST_SHARES, MOST_OF_FREE
from infinity.errors import UsageError
from infinity.model.deferred_init import Drawn, drawn_by
from infinity.system.capacity import device_of, gauge_of, host_free_nbytes
from infinity.system.mapped import FilesAhead, MappedFiles
from infinity.system.ranks import Ranks
from infinity.system.scratch import Place, Scratch

MIN_WINDOW_NBYTES = 1 << 30
DEVICE_SHARE = 2 / 5  # of what is free there, for a window: the engine starts while it is full. Of the host it is what records leave
LATER_FROM_NBYTES = 8 << 10  # smaller values take no more than a generator's state

# What is true of a placeholder, too, or made by its shape and kind alone.
_METADATA = frozenset(
    "shape dtype device layout requires_grad grad grad_fn is_leaf ndim names is_sparse is_cuda is_cpu is_meta is_quantized "
    "_backward_hooks _post_accumulate_grad_hooks _version name itemsize nbytes".split()
)
_METADATA_FUNCTIONS = frozenset(
    "size numel nelement dim ndimension is_floating_point is_complex __hash__ requires_grad_ register_hook __len__ "
    "element_size register_post_accumulate_grad_hook has_names is_inference _is_view is_pinned "
    "new_tensor new_empty new_zeros new_ones new_full empty_like zeros_like ones_like full_like".split()
)
_LAYOUT_FUNCTIONS = frozenset("stride is_contiguous storage_offset".split())  # what is away is contiguous, as its placeholder is not

# They give their first argument new values, whatever it had: methods, and functions of torch.nn.init, which turn gradients off themselves.
_OVERWRITING = frozenset("normal_ uniform_ fill_ zero_ copy_".split())
_INITIALISERS = frozenset("normal_ uniform_ constant_ kaiming_uniform_".split())  # those that tell the mode


@contextlib.contextmanager
def init(config: Config | None = None, *, window: int | None = None):
    """Modules built inside the block belong to an engine; no process ever holds more than `window` bytes of their parameters
    in host memory or on the device (and the module under construction): by default 15 % of what is free in the first and two
    fifths of what is free on the second, at least 1 GiB. Parameters of no more than `window` bytes in all, by default 1 GiB, are whole
    when the block ends.

    With the same seed the weights are those of a plain construction, bit for bit. Every rank must build the same modules.
    """
    config = config or Config()
    device = device_of(config.device)
    with Ranks(device).joined() as ranks:
        windows = _windows(config, device, ranks) if window is None else {"cpu": window, device.type: window}
        builder = _Builder(config, ranks, windows, MIN_WINDOW_NBYTES if window is None else window)
        try:
            with builder, ranks.at("infinity.init"):
                yield
                for root in builder.roots():
                    if cut_large_layers(root, config, ranks):
                        builder.forget_unused()
                builder.settle()
        except BaseException as error:
            ranks.report(error, "infinity.init: ")
            raise
        for root in builder.roots():
            if any(p.is_floating_point() and p.numel() for p in root.parameters()):
                Engine(root, config, builder, ranks)


def _windows(config: Config, device: torch.device, ranks: Ranks) -> dict[str, int]:
    """Bytes by kind of device, the same on all ranks: what leaves, leaves on all of them."""
    free = host_free_nbytes() // ranks.num_local
    taken = HOST_SHARES["cuda"] * free if config.host_memory == "auto" else config.host_memory
    windows = {"cpu": int(MOST_OF_FREE * free - taken)}
    if gauge := gauge_of(device):
        windows[device.type] = int(DEVICE_SHARE * gauge.free_nbytes())
    least = ranks.least(list(windows.values()))
    return {kind: max(MIN_WINDOW_NBYTES, nbytes) for kind, nbytes in zip(windows, least)}


class _Home(NamedTuple):
    """A parameter that has its values: how many bytes, in the memory of which kind of device."""

    param: nn.Parameter
    kind: str
    nbytes: int


def _home_of(param: nn.Parameter) -> _Home:
    return _Home(param, param.device.type, _nbytes(param))


def _nbytes(param: nn.Parameter) -> int:
    return param.numel() * param.element_size()


class _Away:
    """A parameter that is away. source: how its values are drawn, or their place in the scratch file."""

    __slots__ = ("address", "dtype", "numel", "placeholder", "shape", "source")

    def __init__(self, param: nn.Parameter, source: Drawn | Place):
        self.shape, self.dtype, self.numel, self.source = param.shape, param.dtype, param.numel(), source
        self.placeholder = torch.full((), float("nan"), dtype=param.dtype, device=param.device)
        self.address = self.placeholder.data_ptr()

    @property
    def device(self) -> torch.device:
        return self.placeholder.device

    def is_in(self, param: nn.Parameter) -> bool:
        """Whether the parameter still holds the placeholder, and nobody gave it other data, as `set_` does, which no mode sees."""
        return param.data_ptr() == self.address

    def put_in(self, param: nn.Parameter) -> None:
        param.data = self.placeholder.expand(self.shape)


class _Builder(TorchFunctionMode):
    def __init__(self, config: Config, ranks: Ranks, windows: dict[str, int], whole_nbytes: int):
        super().__init__()
        self.ranks = ranks
        self.windows, self.whole_nbytes = windows, whole_nbytes
        self.scratch = Scratch(config.nvme[0], creates=config.creates_nvme, checksums=config.checksums)
        self.num_homecomings = 0  # of parameters whose values were read or drawn inside the block
        self._num_threads = max(1, len(os.sched_getaffinity(0)) // ranks.num_local)
        self._home: dict[int, _Home] = {}  # by identity, oldest first
        self._away: dict[int, tuple[nn.Parameter, _Away]] = {}
        self._placeholders: dict[int, int] = {}  # whose they are, by address
        self._home_nbytes = collections.Counter()  # by kind of device
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._children: set[int] = set()
        self._busy = False
        self._ahead = FilesAhead(windows["cpu"] // 2)

    def __enter__(self):
        self._hooks = [
            register_module_parameter_registration_hook(self._parameter_registered),
            register_module_module_registration_hook(self._module_registered),
        ]
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        self._ahead.__exit__()
        for hook in self._hooks:
            hook.remove()
        for param, away in list(self._away.values()):
            if not away.is_in(param):
                self._forget(id(param))
                self._come_home(param)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._busy or _is_metadata(func):
            return func(*args, **kwargs)
        overwritten = _overwritten_by(func, args, kwargs)
        values = [value for value in (*args, *kwargs.values()) if value is not overwritten]
        if self._away:
            if getattr(func, "__name__", "") in _LAYOUT_FUNCTIONS and (away := self._away_of(args[0])) is not None:
                return func(torch.empty(away.shape, dtype=away.dtype, device="meta"), *args[1:], **kwargs)
            if _attribute(func, "__set__") == "data":
                self._bring_back(args[1:])
                func(*args, **kwargs)
                self._bring_back(args[:1])  # where it is, with its new data
                return None
            self._bring_back(values)
        if overwritten is None or not (id(overwritten) in self._home or id(overwritten) in self._away):
            return func(*args, **kwargs)
        with self._undisturbed():
            return self._overwrite(overwritten, func, args, kwargs)

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

    def settle(self) -> None:
        """The block ends, and with it what the mode sees: what is small, or the program's alone, comes home."""
        used = {id(param): param for root in self.roots() for param in root.parameters()}
        if sum(map(_nbytes, used.values())) <= self.whole_nbytes:
            self._bring_back(used.values())
        for key in [key for key in self._away if key not in used]:
            param, away = self._away[key]
            if isinstance(away.source, Drawn):
                self._forget(key)
                reference = weakref.ref(param)
                del param
                if (param := reference()) is not None and away.is_in(param):
                    param.data = self._load(away).view(away.shape)

    # What the engine asks for until it starts, see `InitialValues`: every rank in the same order.

    def bring_home(self, params: list[nn.Parameter]) -> None:
        self._bring_back(params)

    def send_away(self) -> None:
        self._shrink()

    def value(self, index: int, param: nn.Parameter) -> torch.Tensor:
        """The initial value of a parameter, 1-D, on the CPU or where the parameter was made."""
        away = self._forget(id(param))
        self._leave_home(id(param))
        if away is None:
            return param.detach().reshape(-1)
        if not away.is_in(param) or not away.placeholder.isnan().item():
            raise UsageError(
                f"a parameter of shape {tuple(param.shape)} was changed after `with infinity.init(...)` had ended, when it was "
                f"only a placeholder. Initialise inside the block, or use `with infinity.gathered([parameter]):`."
            )
        value = self._load(away)
        if not self._away:
            self.scratch.close()
        return value

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
        if (key := self._placeholders.get(param.data_ptr())) is not None:  # nn.Parameter(another) asks no mode for the other's data
            original, _ = self._away[key]
            self._bring_back([original])
            param.data = original.data.reshape(param.shape)
        self._come_home(param)

    def _come_home(self, param: nn.Parameter) -> None:
        if param.device.type == "cpu" and not param.untyped_storage().resizable():  # not PyTorch's own memory
            self._ahead.meet(param.data_ptr())
        self._leave_home(id(param))
        home = self._home[id(param)] = _home_of(param)
        self._home_nbytes[home.kind] += home.nbytes

    def _forget(self, key: int) -> _Away | None:
        """A parameter is away no longer."""
        _, away = self._away.pop(key, (None, None))
        if away is not None:
            del self._placeholders[away.address]
            if isinstance(away.source, Place):
                self.scratch.free(away.source)
        return away

    def _away_of(self, param) -> _Away | None:
        """Of a parameter that is away and holds its placeholder."""
        _, away = self._away.get(id(param), (None, None))
        return away if away is not None and away.is_in(param) else None

    def _leave_home(self, key: int) -> None:
        home = self._home.pop(key, None)
        if home is not None:
            self._home_nbytes[home.kind] -= home.nbytes

    def _shrink(self, keep: Collection[int] = ()) -> None:
        """Send the oldest away, but for `keep`, by identity, until the windows hold the rest."""
        full = {kind for kind, window in self.windows.items() if self._home_nbytes[kind] > window}  # where there is none, none leave
        files = MappedFiles() if full else None
        for key, home in list(self._home.items()) if full else ():
            if home.kind not in full or key in keep:
                continue
            if not self._on_all_ranks(not _is_mapped(home.param, files)):
                self._leave_home(key)  # a file has it: it takes no memory that others want
            elif self._may_leave(home.param):
                self._send_away(home.param)
            if self._home_nbytes[home.kind] <= self.windows[home.kind]:
                full.discard(home.kind)

    def _may_leave(self, param: nn.Parameter) -> bool:
        """Whether no rank still refers to the parameter's storage: garbage is collected at other times on other ranks."""
        return self._on_all_ranks(_unshared(param))

    def _on_all_ranks(self, fact: bool) -> bool:
        """What one of them sends away, all must, for they bring it back together."""
        return all(self.ranks.least([fact]))

    def _overwrite(self, param: nn.Parameter, func, args, kwargs):
        """func(*args, **kwargs), which gives the parameter new values: those that it has are not read, and those that it gets are
        drawn later, if they can be."""
        away, version, drawn = self._away_of(param), param._version, None
        try:
            if away is not None:
                param.data = torch.empty(away.shape, dtype=away.dtype, device=away.device)  # what is not touched takes no memory
            if _can_be_drawn_later(param) and self._may_leave(param):
                result, drawn = drawn_by(func, args, kwargs, param)
            else:
                result = func(*args, **kwargs)
        except BaseException:
            if away is not None:
                away.put_in(param)
            raise
        if param._version == version:  # somebody has put another function in its place
            if away is not None:
                away.put_in(param)
            return result
        self._forget(id(param))
        if drawn is not None:
            self._leave(param, drawn)
            return result
        self._notice(param)
        self._shrink(keep={id(param)})
        return result

    def _leave(self, param: nn.Parameter, source: Drawn | Place) -> None:
        away = _Away(param, source)
        away.put_in(param)
        self._away[id(param)], self._placeholders[away.address] = (param, away), id(param)
        self._leave_home(id(param))

    def _send_away(self, param: nn.Parameter) -> None:
        with self._undisturbed():
            numel = -(-param.numel() // self.ranks.world)
            begin = self.ranks.rank * numel
            part = param.detach().reshape(-1)[begin : begin + numel].cpu().contiguous()
            self._leave(param, self.scratch.write(part, numel * param.element_size()))

    def _bring_back(self, values) -> None:
        params = {id(param): param for param in _parameters_in(values)}
        touched = [param for key, param in params.items() if key in self._away]
        for param in touched:
            with self._undisturbed():
                if (away := self._away_of(param)) is not None:
                    self.num_homecomings += 1
                    param.data = self._load(away).to(away.device).reshape(away.shape)
                self._forget(id(param))
            self._notice(param)
        if touched:
            self._shrink(keep=params)

    def _load(self, away: _Away) -> torch.Tensor:
        """Its values, 1-D: drawn on its device, or read to the CPU."""
        if isinstance(away.source, Drawn):
            values = torch.empty(away.numel, dtype=away.dtype, device=away.device)
            away.source.write(values, self._num_threads)
            return values
        numel = -(-away.numel // self.ranks.world)
        part = torch.zeros(numel, dtype=away.dtype, device="cpu")  # whatever the program's default is
        begin = self.ranks.rank * numel
        count = max(0, min(numel, away.numel - begin))
        what = f"{self.ranks.name}, " if self.ranks.world > 1 else ""
        what += f"a parameter of shape {tuple(away.shape)} under construction: "
        self.scratch.read(away.source, part[:count], what)
        return self.ranks.all_gather_slices(part.view(torch.uint8)).view(away.dtype)[: away.numel]

    @contextlib.contextmanager
    def _undisturbed(self):
        """The mode looks away inside the block: from registration hooks, operations would come back to it."""
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before


def _overwritten_by(func, args: tuple, kwargs: dict) -> nn.Parameter | None:
    """The parameter that func gives new values, whatever it had, and has no other use for."""
    name = getattr(func, "__name__", "")
    is_function = name in _INITIALISERS and func is getattr(nn.init, name)
    if not is_function and (name not in _OVERWRITING or getattr(func, "__objclass__", None) is not torch._C.TensorBase):
        return None
    target = args[0] if args else kwargs.get("tensor")
    if not isinstance(target, nn.Parameter) or (not is_function and torch.is_grad_enabled() and target.requires_grad):
        return None
    used = sum(param is target for param in _parameters_in([*args, *kwargs.values()]))
    return target if used == 1 else None


def _can_be_drawn_later(param: nn.Parameter) -> bool:
    """Whether it is all of its storage, in order; see also `_Builder._may_leave`."""
    if type(param) is not nn.Parameter or param.device.type not in ("cpu", "cuda") or not param.is_contiguous() or param.is_inference():
        return False
    return param.untyped_storage().nbytes() == _nbytes(param) >= LATER_FROM_NBYTES


def _is_metadata(func) -> bool:
    return getattr(func, "__name__", "") in _METADATA_FUNCTIONS or _attribute(func, "__get__") in _METADATA


def _attribute(func, access: str) -> str:
    """The name of the tensor's attribute that func, `__get__` or `__set__`, is about; else ""."""
    return getattr(getattr(func, "__self__", None), "__name__", "") if getattr(func, "__name__", "") == access else ""


def _parameters_in(values):
    for value in values:
        if isinstance(value, nn.Parameter):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _parameters_in(value)
        elif isinstance(value, dict):
            yield from _parameters_in(value.values())


def _is_mapped(param: nn.Parameter, files: MappedFiles) -> bool:
    return param.device.type == "cpu" and files.find(param.data_ptr(), 1) is not None


def _unshared(param: nn.Parameter) -> bool:
    """Whether the parameter alone refers to its storage."""
    storage = param.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) <= 2  # the parameter's and the one just made

