"""What libraries leave behind in a process goes after each test: process groups, variables of launchers, states of Accelerators."""

import os
import sys

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def alone():
    before = dict(os.environ)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)
    if accelerate := sys.modules.get("accelerate"):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()
