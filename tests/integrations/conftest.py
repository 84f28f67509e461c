"""Each test ends without process groups, launcher variables and Accelerator states that libraries left in the process."""

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
