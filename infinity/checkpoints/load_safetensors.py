"""Loading weights from safetensors files into a model with an engine: `infinity.load_safetensors`.

Knows names, and the part of a file's tensor that each parameter takes. Must not know records: the engine slices the values.
"""

from __future__ import annotations

import os

import torch
from torch import nn

from infinity.checkpoints.contents import persistent_buffers
from infinity.checkpoints.quantised import DecodedFiles
from infinity.config import checked_path
from infinity.engine.access.training_state import TrainingState, training_state_of
from infinity.errors import CheckpointError
from infinity.model import tiling
from infinity.sizes import listed


def load_safetensors(model: nn.Module, path: str | os.PathLike, *, strict: bool = True) -> None:
    """Load a model's weights and buffers from a safetensors file, or from a folder of such files, as Hugging Face models have.

    The names in the files are the names of the model's state_dict(). One name of a tied parameter is enough. Values may have any floating
    dtype; fp32 values become masters. Quantised weights of bitsandbytes (4 bits) and compressed-tensors (int8, fp8, mxfp4) are decoded. As
    frozen weights of the same `frozen_dtype` they keep their codes, if the blocks agree: nf4 of blocks of 64, int8 and fp8 with rows and
    groups of multiples of 128, mxfp4. Each rank reads only its own slices, a part of a tensor at a time. The moments do not change. Call
    load_safetensors on all ranks. If the model was built in `infinity.init` and has no optimizer yet, the engine reads the files when the
    optimizer is made. Keep the files until then.

    The files of some transformers models, such as Mixtral and LLaVA, have other names than the model. transformers renames and merges
    these tensors in `from_pretrained`. Call `from_pretrained` inside `infinity.init` instead.

    Raises CheckpointError for damaged files. Raises CheckpointError before any change, with all names that are missing, unknown or of
    another shape. strict=False allows missing and unknown names, unless no name fits.
    """
    state = training_state_of(model)
    checked_path(path)
    own = {name for name, _ in _entries(model)}
    files = state.ranks.together(lambda: DecodedFiles(path, own), undo=DecodedFiles.close)
    try:
        sources = state.ranks.together(lambda: _match(model, files, strict))
        state.ranks.together(lambda: _give(state, sources))
    except BaseException:
        files.close()
        raise


def _match(model: nn.Module, files: DecodedFiles, strict: bool) -> list[tuple[torch.Tensor, _FilePart]]:
    """Return each parameter and buffer once, as (tensor, values in the files)."""
    places = tiling.places(model)
    wanted: dict[str, list[tuple[str, torch.Tensor]]] = {}  # by tensor: (a name of it, the parameter or buffer)
    tied: dict[int, set[str]] = {}
    for name, value in _entries(model):
        place = places.get(value)
        whole = place.name if place is not None else name
        tied.setdefault(id(value), set()).add(whole)
        wanted.setdefault(whole, []).append((name, value))
    wrong, missing, sources = [], [], {}
    for whole, entries in wanted.items():
        names = [whole, *(other for _, value in entries for other in sorted(tied[id(value)]))]
        found = next((name for name in names if name in files.names), None)
        if found is None:
            unreadable = next((name for name in names if name in files.unreadable), None)
            if unreadable is not None:
                wrong.append(files.unreadable[unreadable].refusal)
            else:
                missing.append(whole)
            continue
        info = files.names[found]
        for name, value in entries:
            place = places.get(value)
            shape = place.shape if place is not None else tuple(value.shape)
            if info.shape != shape:
                wrong.append(f"{whole} has shape {list(info.shape)} in the files and {list(shape)} in the model")
                break
            if value.is_floating_point() and not info.dtype.is_floating_point:
                wrong.append(f"{whole} is {info.dtype} in the files, expected a floating-point dtype")
                break
            sources.setdefault(id(value), (value, _FilePart(files, found, value.shape, place.begin if place is not None else None)))
    unknown = sorted((files.names.keys() | files.unreadable.keys()) - {name for names in tied.values() for name in names})
    if strict or (missing and unknown and not sources):
        wrong += [f"{what}: {listed(names)}" for what, names in (("missing in the files", missing), ("unknown to the model", unknown)) if names]
    if wrong:
        remedy = _from_pretrained(model, files.path) if missing and unknown else ""
        raise CheckpointError(f"{files.path} does not fit the model: {'; '.join(wrong)}{remedy}")
    return list(sources.values())


def _from_pretrained(model: nn.Module, path: str) -> str:
    """Return a message with the lines that load a transformers model under other names; "" if no module is a transformers model."""
    kinds = (type(module) for module in model.modules())
    kind = next((kind for kind in kinds if hasattr(kind, "from_pretrained") and hasattr(kind, "base_model_prefix")), None)
    if kind is None:
        return ""
    return (
        f". transformers may rename or merge these tensors in from_pretrained, and load_safetensors does not. If these are the files of a "
        f"{kind.__name__}, load them with these lines, before the optimizer is made:\n"
        f"    with infinity.init(config):\n"
        f"        model = {kind.__name__}.from_pretrained({path!r})"
    )


def _give(state: TrainingState, sources: list[tuple[torch.Tensor, _FilePart]]) -> None:
    for value, part in sources:
        if state.manages(value):
            state.give_weight(value, part)
        else:
            with torch.no_grad():
                value.copy_(part[: value.numel()].view(value.shape))


class _FilePart:
    """The values of a parameter in a file, 1-D. Indexing with a slice reads these elements."""

    def __init__(self, files: DecodedFiles, name: str, shape: torch.Size, begin: tuple[int, ...] | None):
        self.files, self.name, self.dtype = files, name, files.names[name].dtype
        self.is_decoded = files.is_decoded(name)  # from a quantised weight, whose bits need values in fp32
        self.numel = shape.numel()
        whole = files.names[name].shape
        self.row = shape[1:].numel() if len(shape) > 1 else 1  # elements per row: of the parameter, and below of the whole tensor
        self.whole_row = torch.Size(whole[1:]).numel() if len(whole) > 1 else 1
        self.begin = begin[0] if begin else 0
        self.column = begin[1] if begin and len(begin) > 1 else 0

    def __getitem__(self, part: slice) -> torch.Tensor:
        start, stop, _ = part.indices(self.numel)
        if self.row == self.whole_row:
            return self._read(self.begin * self.row + start, stop - start)
        first, last = start // self.row, -(-stop // self.row)
        rows = self._read((self.begin + first) * self.whole_row, (last - first) * self.whole_row).view(-1, self.whole_row)
        values = rows[:, self.column : self.column + self.row].reshape(-1)
        return values[start - first * self.row : stop - first * self.row]

    def scales(self, storage: str, start: int, numel: int) -> torch.Tensor | None:
        """The scales of elements [start, start + numel) in the blocks of a storage, if the file has one scale for each of these blocks."""
        return self.files.scales(self.name, storage, self.begin * self.row + start, numel) if self.row == self.whole_row else None

    def to(self, dtype: torch.dtype, **options) -> torch.Tensor:
        return self[:].to(dtype, **options)

    def _read(self, start: int, numel: int) -> torch.Tensor:
        return self.files.read(self.name, start, numel)


def _entries(model: nn.Module):
    """Yield every parameter under each of its names, and every buffer that a state_dict has."""
    yield from model.named_parameters(remove_duplicate=False)
    for prefix, module in model.named_modules():
        for name, buffer in persistent_buffers(module).items():
            yield f"{prefix}.{name}" if prefix else name, buffer
