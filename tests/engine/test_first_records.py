"""The first records: zeros are neither written nor moved, and training from them has the bits of host memory."""

import pytest
from support.helpers import assert_same_states, states_of, training
from support.models import gpt_step, tiny_gpt

from infinity.formats.dtypes import TORCH_DTYPES
from infinity.plan.record import STATES, WEIGHTS
from infinity.tiers.record_mover import RecordMover


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("compression", ["on", "off"])
@pytest.mark.parametrize("values, dtype, num", [("bf16", "bf16", 0), ("fp32", "bf16", 1), ("fp32", "fp32", 0), ("fp16", "fp16", 1)])
def test_first_states_that_are_zeros_pass_through_no_memory(values, dtype, num, compression, monkeypatch, tmp_path):
    """Only a master that the weights do not hold needs its states in host memory at the start."""
    fresh, kinds = RecordMover.fresh, []
    monkeypatch.setattr(RecordMover, "fresh", lambda mover, chunk, kind: kinds.append(kind) or fresh(mover, chunk, kind))
    make = lambda: tiny_gpt().to(TORCH_DTYPES[values])
    config = {"dtype": dtype, "compression": compression, "options": {"max_grad_norm": 0.5}}
    found = {}
    for tier in ("nvme", "host"):
        del kinds[:]
        with training(make, tmp_path / tier, param_tier=tier, optimizer_state_tier=tier, **config) as (model, engine, optimizer):
            engine.start()
            assert set(kinds) == ({WEIGHTS, STATES} if num else {WEIGHTS})
            for param in model.parameters():
                state = engine.read_state(param)
                assert not any(state[name].any() for name in ("momentum", "variance"))
            for step in range(3):
                gpt_step(model, optimizer, step)
            found[tier] = states_of(engine, model)
    assert_same_states(found["nvme"], found["host"])
