"""Construction of models that are larger than any memory of the process: `infinity.init`.

Knows new parameters, the window for them in each memory, and the values of parameters that are away. Must not know chunks or tiers: the
engine later asks for each parameter's initial value and lays out the records.
"""

# [Note: parameters under construction]
# Registration hooks report a new parameter when the parameter, or a module around the parameter, is registered. A TorchFunctionMode sees every
# operation, also `.data` and deepcopy. There are three kinds of parameters:
# - Initialised by a known function: only the call is noted ([Note: values drawn later] in infinity/model/deferred_init.py). The parameter is
#   away at once. Its values are drawn later, directly for its record.
# - Mapped from a file, as by from_pretrained of transformers: the values stay there. The first parameter makes the kernel read ahead.
# - All others: the newest stay in memory. If parameters exceed the window of their memory, the oldest move to a scratch file. Each rank writes
#   a slice of 1/world. Parameters of zeros take no place in the file. `torch.empty` on a GPU gives zeros inside the block. So packed experts
#   on a GPU, which a model initialises after all modules are made, do not go to the file before.
#
# A parameter that is away has a placeholder, one NaN expanded to the shape. An operation on the placeholder brings the values back, unless the
# operation reads only metadata or overwrites the parameter. Parents may therefore initialise their children again. Values and random numbers
# are those of a plain construction. A parameter that comes back frees its place in the file. A parameter whose storage has another reference
# never moves away: a write through that reference would be lost.

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from infinity.config import Config
from infinity.engine.engine import Engine
from infinity.engine.offload import cut_large_layers
from infinity.engine.sizing import MOST_OF_FREE, PROGRAM_SHARE
from infinity.errors import UsageError
from infinity.model.deferred_init import Drawn, drawn_by, drawn_zeros
from infinity.model.tensor_functions import LAYOUT_FUNCTIONS, attribute_of, is_metadata, overwritten_by, parameters_in
from infinity.system.capacity import device_of, gauge_of, host_free_nbytes, num_cores
from infinity.system.garbage_collector import without_collections
from infinity.system.mapped import FilesAhead, MappedFiles
from infinity.system.ranks import Ranks, make_ranks
from infinity.system.scratch import Place, Scratch

MIN_WINDOW_NBYTES = 1 << 30
DEVICE_SHARE = 2 / 5  # window's share of free device memory: the engine starts with a full window. The host's window is memory beside records
_MIN_FILLED_NBYTES = 1 << 20  # smaller tensors of a GPU stay as they are
LATER_FROM_NBYTES = 8 << 10  # a generator's state takes about as much: smaller parameters are drawn at once


@contextlib.contextmanager
def init(config: Config | None = None, *, window: int | None = None):
    """An engine manages the modules that are built inside the block.

    No process holds more than `window` bytes of their parameters in host memory or on the device, besides the module under construction.
    Default: 8 % of free host memory, and 40 % of free device memory or of device_memory, each at least 1 GiB. If all parameters together have
    at most `window` bytes (default 1 GiB), they hold their values when the block ends.

    With the same seed the weights are those of a plain construction, bit for bit. Every rank must build the same modules.
    """
    config = config or Config()
    device = device_of(config.device)
    with make_ranks(device).joined() as ranks, without_collections():
        windows = _windows(config, device, ranks) if window is None else {"cpu": window, device.type: window}
        mode = ConstructionMode(config, ranks, windows, MIN_WINDOW_NBYTES if window is None else window)
        try:
            with mode, ranks.at("infinity.init"):
                yield
                for root in mode.roots():
                    if cut_large_layers(root, config, ranks):
                        mode.forget_unused()
                mode.settle()
        except BaseException as error:
            ranks.report(error, "infinity.init: ")
            raise
        for root in mode.roots():
            if any(p.is_floating_point() and p.numel() for p in root.parameters()):
                Engine(root, config, mode, ranks)


def _windows(config: Config, device: torch.device, ranks: Ranks) -> dict[str, int]:
    """Bytes of each window, by kind of device. Equal on all ranks, because all ranks move the same parameters away."""
    free = host_free_nbytes() // ranks.num_local
    taken = (1 - PROGRAM_SHARE) * free if config.host_memory == "auto" else config.host_memory
    windows = {"cpu": int(MOST_OF_FREE * free - taken)}
    if gauge := gauge_of(device):
        free = gauge.free_nbytes()
        windows[device.type] = int(DEVICE_SHARE * (free if config.device_memory == "auto" else min(free, config.device_memory)))
    least = ranks.least(list(windows.values()))
    return {kind: max(MIN_WINDOW_NBYTES, nbytes) for kind, nbytes in zip(windows, least)}


class PresentParameter(NamedTuple):
    """A parameter that holds its values. kind, nbytes: the device type, and the size in the memory of this type."""

    param: nn.Parameter
    kind: str
    nbytes: int


def _present_of(param: nn.Parameter) -> PresentParameter:
    with torch._C.DisableTorchFunction():  # each getter would call `__torch_function__`
        return PresentParameter(param, param.device.type, _nbytes(param))


def _nbytes(param: nn.Parameter) -> int:
    return param.numel() * param.element_size()


class AwayParameter:
    """A parameter that is away. source: the random draw of its values, or their place in the scratch file."""

    __slots__ = ("address", "dtype", "numel", "placeholder", "shape", "source")

    def __init__(self, param: nn.Parameter, source: Drawn | Place):
        self.shape, self.dtype, self.numel, self.source = param.shape, param.dtype, param.numel(), source
        self.placeholder = torch.full((), float("nan"), dtype=param.dtype, device=param.device)
        self.address = self.placeholder.data_ptr()

    @property
    def device(self) -> torch.device:
        return self.placeholder.device

    def is_in(self, param: nn.Parameter) -> bool:
        """Whether the parameter still holds the placeholder. The program may have called `set_`, which no mode sees."""
        return param.data_ptr() == self.address

    def put_in(self, param: nn.Parameter) -> None:
        param.data = self.placeholder.expand(self.shape)


class ConstructionMode(TorchFunctionMode):
    """Observes the construction inside `infinity.init`. Gives initial values to the engine until the start, as `InitialValues` does."""

    def __init__(self, config: Config, ranks: Ranks, windows: dict[str, int], whole_nbytes: int):
        super().__init__()
        self.ranks = ranks
        self.windows, self.whole_nbytes = windows, whole_nbytes
        self.scratch = Scratch(config.swap_dirs[0], creates=config.creates_swap_dir, checksums=config.checksums)
        self.num_homecomings = 0  # parameters that were brought back
        self._num_threads = max(1, num_cores() // ranks.num_local)
        self._present: dict[int, PresentParameter] = {}  # by id, oldest first
        self._away: dict[int, tuple[nn.Parameter, AwayParameter]] = {}
        self._placeholders: dict[int, int] = {}  # id of the parameter, by address
        self._present_nbytes = collections.Counter()  # by kind of device
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
                self._note_present(param)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._busy or is_metadata(func):
            return func(*args, **kwargs)
        if attribute_of(func, "__set__") == "data":
            return self._set_data(func, *args)
        overwritten = overwritten_by(func, args, kwargs)
        values = [value for value in (*args, *kwargs.values()) if value is not overwritten]
        if self._away:
            if getattr(func, "__name__", "") in LAYOUT_FUNCTIONS and (away := self._away_of(args[0])) is not None:
                return func(torch.empty(away.shape, dtype=away.dtype, device="meta"), *args[1:], **kwargs)
            self._bring_back(values)
        if overwritten is None or not (id(overwritten) in self._present or id(overwritten) in self._away):
            result = func(*args, **kwargs)
            if func is torch.empty:
                _fill_with_zeros(result)
            return result
        with self._undisturbed():
            return self._overwrite(overwritten, func, args, kwargs)

    def _set_data(self, func, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """`tensor.data = value`. func: the setter."""
        self._bring_back([value])
        func(tensor, value)
        if id(tensor) in self._present:
            self._note_present(tensor)
        else:
            self._bring_back([tensor])

    def roots(self) -> list[nn.Module]:
        """The modules without a parent, oldest first."""
        alive = [reference() for reference in self._modules.values()]
        return [module for module in alive if module is not None and id(module) not in self._children]

    def forget_unused(self) -> None:
        """Forget parameters that no module holds any more."""
        used = {id(param) for root in self.roots() for param in root.parameters()}
        for key in [key for key in (*self._present, *self._away) if key not in used]:
            self._forget_present(key)
            self._forget(key)

    def settle(self) -> None:
        """The block ends. Small models, and parameters that only the program holds, get their values back."""
        with torch._C.DisableTorchFunction():
            used = {id(param): param for root in self.roots() for param in root.parameters()}
            nbytes = sum(map(_nbytes, used.values()))
        if nbytes <= self.whole_nbytes:
            self._bring_back(used.values())
        for key in [key for key in self._away if key not in used]:
            param, away = self._away[key]
            if isinstance(away.source, Drawn):
                self._forget(key)
                reference = weakref.ref(param)
                del param
                if (param := reference()) is not None and away.is_in(param):
                    param.data = self._load(away).view(away.shape)

    # Called by the engine until its start, on all ranks in the same order.

    def bring_home(self, params: list[nn.Parameter]) -> None:
        self._bring_back(params)

    def send_away(self) -> None:
        self._shrink()

    def value(self, index: int, param: nn.Parameter) -> torch.Tensor:
        """The initial value of a parameter, 1-D, on the CPU or where the parameter was made."""
        away = self._forget(id(param))
        self._forget_present(id(param))
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
        with torch._C.DisableTorchFunction():  # each getter would call `__torch_function__`
            self._note_module(module)
            if param is not None:
                self._notice(param)
                self._shrink(keep=(id(param),))

    def _module_registered(self, module, name, child):
        with torch._C.DisableTorchFunction():
            self._note_module(module)
            if child is not None:
                self._note_module(child)
                self._children.add(id(child))
                self._shrink()

    def _note_module(self, module: nn.Module) -> None:
        """Note a module. An unknown one may have been made outside of the block, with parameters that no hook has reported."""
        reference = self._modules.get(id(module))
        if reference is None or reference() is not module:
            self._children.discard(id(module))  # the address of an earlier module
            self._modules[id(module)] = weakref.ref(module)
            for param in module.parameters():
                self._notice(param)

    def _notice(self, param: nn.Parameter) -> None:
        present = self._present.get(id(param))
        if present is not None:
            if present != _present_of(param):  # an operation outside of the mode has changed the data
                self._note_present(param)
            return
        if id(param) in self._away or not param.is_floating_point() or not param.numel():
            return
        if (key := self._placeholders.get(param.data_ptr())) is not None:  # nn.Parameter(other) has copied a placeholder, unseen
            original, _ = self._away[key]
            self._bring_back([original])
            param.data = original.data.reshape(param.shape)
        self._note_present(param)

    def _note_present(self, param: nn.Parameter) -> None:
        if param.device.type == "cpu" and not param.untyped_storage().resizable():  # not allocated by PyTorch
            self._ahead.meet(param.data_ptr())
        self._forget_present(id(param))
        present = self._present[id(param)] = _present_of(param)
        self._present_nbytes[present.kind] += present.nbytes

    def _forget(self, key: int) -> AwayParameter | None:
        """The parameter is not away any more. Returns the parameter's entry, or None if the parameter was not away."""
        _, away = self._away.pop(key, (None, None))
        if away is not None:
            del self._placeholders[away.address]
            if isinstance(away.source, Place):
                self.scratch.free(away.source)
        return away

    def _away_of(self, param) -> AwayParameter | None:
        """The entry of a parameter that is away and holds its placeholder, or None."""
        _, away = self._away.get(id(param), (None, None))
        return away if away is not None and away.is_in(param) else None

    def _forget_present(self, key: int) -> None:
        present = self._present.pop(key, None)
        if present is not None:
            self._present_nbytes[present.kind] -= present.nbytes

    def _shrink(self, keep: Collection[int] = ()) -> None:
        """Move the oldest parameters away until the windows hold the rest. keep: ids of parameters that stay."""
        full = {kind for kind, window in self.windows.items() if self._present_nbytes[kind] > window}
        files = MappedFiles() if full else None
        for key, present in list(self._present.items()) if full else ():
            if present.kind not in full or key in keep:
                continue
            if not self._on_all_ranks(not _is_mapped(present.param, files)):
                self._forget_present(key)  # the kernel can free pages of a mapped file
            elif self._may_leave(present.param):
                self._move_away(present.param)
            if self._present_nbytes[present.kind] <= self.windows[present.kind]:
                full.discard(present.kind)

    def _may_leave(self, param: nn.Parameter) -> bool:
        """Whether no rank has another reference to the parameter's storage. Ranks collect garbage at different times."""
        return self._on_all_ranks(_unshared(param))

    def _on_all_ranks(self, fact: bool) -> bool:
        """Whether the fact holds on all ranks: all ranks must move the same parameters away, because they bring values back together."""
        return all(self.ranks.least([fact]))

    def _overwrite(self, param: nn.Parameter, func, args, kwargs):
        """Call func(*args, **kwargs), which overwrites the parameter. No old value is read, and new values are drawn later if possible."""
        away, version, drawn = self._away_of(param), param._version, None
        try:
            if away is not None:
                param.data = torch.empty(away.shape, dtype=away.dtype, device=away.device)  # untouched pages take no memory
            if _can_be_drawn_later(param) and self._may_leave(param):
                result, drawn = drawn_by(func, args, kwargs, param)
            else:
                result = func(*args, **kwargs)
        except BaseException:
            if away is not None:
                away.put_in(param)
            raise
        if param._version == version:  # the program has patched func, and nothing was written
            if away is not None:
                away.put_in(param)
            return result
        self._forget(id(param))
        if drawn is not None:
            self._install_placeholder(param, drawn)
            return result
        self._notice(param)
        self._shrink(keep={id(param)})
        return result

    def _install_placeholder(self, param: nn.Parameter, source: Drawn | Place) -> None:
        away = AwayParameter(param, source)
        away.put_in(param)
        self._away[id(param)], self._placeholders[away.address] = (param, away), id(param)
        self._forget_present(id(param))

    def _move_away(self, param: nn.Parameter) -> None:
        with self._undisturbed():
            if self._on_all_ranks((zeros := drawn_zeros(param)) is not None):
                return self._install_placeholder(param, zeros)
            begin, numel = self._share(param.numel())
            part = param.detach().reshape(-1)[begin : begin + numel].cpu().contiguous()
            self._install_placeholder(param, self.scratch.write(part, numel * param.element_size()))

    def _bring_back(self, values) -> None:
        params = {id(param): param for param in parameters_in(values)}
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

    def _share(self, numel: int) -> tuple[int, int]:
        """The first element of this rank's share of a parameter, and the elements of a share. All shares but the last are equal."""
        share = -(-numel // self.ranks.world)
        return self.ranks.rank * share, share

    def _load(self, away: AwayParameter) -> torch.Tensor:
        """The values, 1-D: drawn on the parameter's device, or read to the CPU."""
        if isinstance(away.source, Drawn):
            values = torch.empty(away.numel, dtype=away.dtype, device=away.device)
            away.source.write(values, self._num_threads)
            return values
        begin, numel = self._share(away.numel)
        part = torch.zeros(numel, dtype=away.dtype, device="cpu")  # even if the program has set another default device
        count = max(0, min(numel, away.numel - begin))
        what = self.ranks.label
        what += f"a parameter of shape {tuple(away.shape)} under construction: "
        self.scratch.read(away.source, part[:count], what)
        return self.ranks.all_gather_slices(part.view(torch.uint8)).view(away.dtype)[: away.numel]

    @contextlib.contextmanager
    def _undisturbed(self):
        """Inside the block the mode ignores operations. The mode's own operations, also in registration hooks, would recurse."""
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before


def _fill_with_zeros(empty: torch.Tensor) -> None:
    """Fill a new tensor of a GPU with zeros, unless it is small, or torch has filled it."""
    if empty.is_cuda and empty.nbytes >= _MIN_FILLED_NBYTES and not torch.are_deterministic_algorithms_enabled():
        with torch.no_grad():
            empty.zero_()


def _can_be_drawn_later(param: nn.Parameter) -> bool:
    """Whether the parameter fills a whole storage in order; see also `ConstructionMode._may_leave`."""
    if type(param) is not nn.Parameter or param.device.type not in ("cpu", "cuda") or not param.is_contiguous() or param.is_inference():
        return False
    return param.untyped_storage().nbytes() == _nbytes(param) >= LATER_FROM_NBYTES


def _is_mapped(param: nn.Parameter, files: MappedFiles) -> bool:
    return param.device.type == "cpu" and files.find(param.data_ptr(), 1) is not None


def _unshared(param: nn.Parameter) -> bool:
    """Whether the parameter has the only reference to its storage."""
    storage = param.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) <= 2  # one reference of the parameter, one of this function
