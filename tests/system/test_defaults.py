"""A program's default dtype and device change no bit: tensors of the engine have explicit dtypes and devices."""

import contextlib

import pytest
import torch
from support.helpers import assert_same_states, states_of, training
from support.models import tiny_gpt, tokens

import infinity
from infinity import load_dcp

pytestmark = pytest.mark.usefixtures("one_thread")


@contextlib.contextmanager
def defaults(dtype, device):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device) if device else contextlib.nullcontext():
            yield
    finally:
        torch.set_default_dtype(before)


PLACES = {
    "host": {"param_tier": "host", "optimizer_state_tier": "host"},
    "nvme": {"param_tier": "nvme", "optimizer_state_tier": "nvme", "host_memory": "320KiB"},
    "device": {"param_tier": "device", "optimizer_state_tier": "device"},
    "bf16 moments": {"dtype": "bf16", "optimizer_state_dtype": "bf16"},
    "fp16": {"dtype": "fp16"},
}


def run(place, folder, dtype=torch.float32, device=None):
    """Return states after two steps with clipping and accumulation, and states of engines that load the saved checkpoint of each format."""
    options = {"max_grad_norm": 0.5, "accumulation_steps": 2}
    batches = [[tokens(step, micro) for micro in range(2)] for step in range(2)]

    def make():
        with defaults(torch.float32, "cpu"):
            return tiny_gpt()

    with defaults(dtype, device), training(make, folder, options=options, **place) as (model, engine, optimizer):
        for micro_batches in batches:
            for batch in micro_batches:
                model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        infinity.save(folder / "own", model, optimizer)
        infinity.save_dcp(folder / "dcp", model, optimizer)
        found = [states_of(engine, model)]
    for load, name in ((infinity.load, "own"), (lambda *args: load_dcp(*args, trust_pickle=True), "dcp")):
        with defaults(dtype, device), training(make, folder, seed=1, options=options, **place) as (model, engine, optimizer):
            load(folder / name, model, optimizer)
            found.append(states_of(engine, model))
    return found


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("dtype, device", [(torch.bfloat16, "meta"), pytest.param(torch.float64, None, marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("place", [pytest.param(name, marks=[] if name in ("nvme", "bf16 moments") else pytest.mark.long) for name in PLACES])
def test_no_bit_depends_on_the_programs_defaults(place, dtype, device, tmp_path):
    expected = run(PLACES[place], tmp_path / "usual")
    found = run(PLACES[place], tmp_path / "other", dtype, device)
    for name, one, other in zip(("trained", "loaded", "loaded from DCP"), expected, found):
        assert_same_states(other, one, name)
