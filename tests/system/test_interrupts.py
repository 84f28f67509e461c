"""SIGINT at many Python lines of a training step: afterwards the step either has not begun or has ended."""

import functools
import signal
import sys
import weakref

import pytest
import torch
from support.helpers import NVME, assert_equals_reference, assert_nothing_held, plain, training
from support.models import checkpointed, inputs, loss_of, mlp

SETTINGS = {
    "nvme": NVME | {"update": "deferred"},
    "compressed": NVME | {"update": "deferred", "compression": "on"},
    "some of it on nvme": {"update": "deferred", "host_memory": "40KiB", "device_memory": "24KiB"},
    "activation_tier": NVME | {"update": "deferred", "activation_tier": "nvme"},
    "host": {"update": "deferred", "param_tier": "host", "optimizer_state_tier": "host", "residency": "none"},
    "resident": {"update": "deferred"},
}
# Without interrupts: PyTorch's files whose global switches an interrupt leaves changed, and finalizers, in which Python drops exceptions.
LEFT_OUT = (torch.utils.checkpoint.__file__, torch.autograd.graph.__file__, torch.autograd.grad_mode.__file__, torch.utils._contextlib.__file__)
LEFT_OUT += (torch.autograd.profiler.__file__, weakref.__file__)
MODELS = {"mlp": mlp, "checkpointed": functools.partial(checkpointed, False), "reentrant": functools.partial(checkpointed, True)}


def train(model, optimizer, step):
    loss_of(model(inputs(model, step))).backward()
    optimizer.step()
    optimizer.zero_grad()


def evaluate(model):
    with torch.no_grad():
        return loss_of(model(inputs(model, 100)))


def interrupted(work, number):
    """Run work() with a SIGINT at the number-th Python line (0: none). Return the number of lines that were run."""
    seen = 0

    def trace(frame, event, _):
        nonlocal seen
        if event == "call" and frame.f_code.co_filename in LEFT_OUT:
            return None
        if event == "line":
            seen += 1
            if seen == number:
                signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return seen


def positions(num_lines, num):
    """Return `num` line numbers, evenly spaced."""
    return [1 + i * (num_lines - 1) // (num - 1) for i in range(num)]


def try_each(make, config, directory, num):
    reference_model, reference = plain(make)
    with training(make, directory, **config) as (model, engine, optimizer):
        step, num_ended = 0, [0, 0]

        def follow():
            nonlocal step
            train(reference_model, reference, step)
            step += 1

        for _ in range(3):
            train(model, optimizer, step)
            follow()
        num_lines = interrupted(lambda: train(model, optimizer, step), 0)
        follow()
        for number in positions(num_lines, num):
            interrupted(lambda: train(model, optimizer, step), number)
            optimizer.zero_grad()
            loss = evaluate(model)
            has_ended = not torch.equal(loss, evaluate(reference_model))
            if has_ended:
                follow()
            num_ended[has_ended] += 1
            assert torch.equal(loss, evaluate(reference_model)), f"after an interrupt at line {number} of {num_lines}"
            assert_equals_reference(engine, model, reference_model, reference)
            assert_nothing_held(engine)
            assert torch._C._is_torch_function_enabled(), f"__torch_function__ stayed off after an interrupt at line {number} of {num_lines}"
            train(model, optimizer, step)
            follow()
        assert_equals_reference(engine, model, reference_model, reference)
        assert all(num_ended), num_ended
    while torch._C._autograd._top_saved_tensors_default_hooks(True):  # PyTorch loses hooks of an interrupted checkpoint
        torch._C._autograd._pop_saved_tensors_default_hooks()


OF_REENTRANT = {"nvme", "some of it on nvme"}  # short runs: other settings run the same lines as `checkpointed`
CASES = [
    pytest.param(make, setting, marks=[pytest.mark.long] if make == "reentrant" and setting not in OF_REENTRANT else [])
    for make in MODELS
    for setting in SETTINGS
]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("make, setting", CASES)
def test_a_step_that_is_interrupted_has_not_begun_or_has_ended(make, setting, tmp_path):
    try_each(MODELS[make], SETTINGS[setting], tmp_path, 60)


@pytest.mark.long
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("make", MODELS)
def test_a_step_that_is_interrupted_anywhere_has_not_begun_or_has_ended(make, setting, tmp_path):
    try_each(MODELS[make], SETTINGS[setting], tmp_path, 1000)
