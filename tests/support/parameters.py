"""Places of parameters, and the comparison of a whole model with plain PyTorch."""

import torch
from support.helpers import NVME, assert_equals_reference
from torch import nn

PLACES = {
    "device": {"param_tier": "device", "optimizer_state_tier": "device", "residency": "auto", "device_memory": "auto"},
    "host": {"param_tier": "host", "optimizer_state_tier": "host", "residency": "auto", "device_memory": "auto"},
    "nvme": NVME | {"device_memory": "auto"},
    "tight": NVME | {"device_memory": "8KiB"},
}


def assert_alike(engine, model, reference_model, reference):
    """Compare states, buffers, and parameters outside the engine with their gradients."""
    theirs = dict(reference_model.named_parameters())
    assert [name for name, _ in model.named_parameters()] == list(theirs)
    for name, param in model.named_parameters():
        if engine.registry.find(param) is None:
            assert torch.equal(param, theirs[name]), name
            assert (param.grad is None) == (theirs[name].grad is None), name
            assert param.grad is None or torch.equal(param.grad, theirs[name].grad), name
        else:
            only = nn.Module()
            only.param = param
            other = nn.Module()
            other.param = theirs[name]
            assert_equals_reference(engine, only, other, reference)
    for (name, buffer), expected in zip(model.named_buffers(), reference_model.buffers(), strict=True):
        assert torch.equal(buffer, expected), name
