"""Facts that autograd keeps about parameters: the backward pass under way, hooks on gradients, and the count of writes to a tensor.

Knows torch.autograd. Must not know where values are, or when they come.
"""

from __future__ import annotations

import torch
from torch._C import DisableTorchFunctionSubclass


def autograd_runs() -> bool:
    """Whether this thread is in a backward pass, of an engine or not."""
    return torch._C._current_graph_task_id() != -1


def num_accumulated_hooks(param: torch.nn.Parameter) -> int:
    """Hooks on the accumulated gradient of a parameter, that of the engine included."""
    with DisableTorchFunctionSubclass():
        return len(param._post_accumulate_grad_hooks or ())


def num_gradient_hooks(param: torch.nn.Parameter) -> int:
    """Hooks on each gradient of a parameter, that of the engine included."""
    with DisableTorchFunctionSubclass():
        return len(param._backward_hooks or ())


def share_version(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the two tensors have one version counter. Parts of a storage may have their own, such as those of unsafe_chunk."""
    version = one._version
    with torch.autograd._unsafe_preserve_version_counter(other):
        torch.autograd.graph.increment_version(other)
        return one._version != version


def overwrite(view: torch.Tensor, data: torch.Tensor, counter: torch.Tensor) -> None:
    """Write data to a view of device memory. The write counts for autograd as a write to the parameter of this counter."""
    with torch.no_grad():
        view.copy_(data.clone() if data.untyped_storage()._cdata == view.untyped_storage()._cdata else data)
    torch.autograd.graph.increment_version(counter)


@torch.inference_mode(False)  # an evaluation may be the first to need the tensor, and training uses it later
def flat_tensor(storage: torch.UntypedStorage, dtype: torch.dtype, numel: int) -> torch.Tensor:
    """A 1-D [numel] tensor over the whole storage."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, (numel,), (1,))


@torch.inference_mode(False)
def parameter_view(flat: torch.Tensor, shape: torch.Size, stride: tuple[int, ...], offset: int) -> torch.Tensor:
    """The elements of one parameter in a flat tensor."""
    return flat.as_strided(shape, stride, offset)
