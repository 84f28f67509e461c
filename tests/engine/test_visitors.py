"""Records that visit the device while updates run in backward: each is updated once its gradient is complete, and keeps no gradient."""

import pytest
from support.helpers import assert_same_states, states_of, training
from support.models import gpt_step, gpt_step_by_layer, tiny_gpt, tokens

import infinity
from infinity.model.gpt import GPT

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {"chunk_mib": 1 / 512, "host_memory": "128KiB"}
AT_HOME = SMALL | {"param_tier": "host", "optimizer_state_tier": "host", "host_memory": "4MiB"}


def visitors(engine):
    return [chunk for chunk in engine.registry.chunks if chunk.on_device and chunk.trainable]


def trained(directory, step_of=gpt_step, make=tiny_gpt, **config):
    with training(make, directory, **config) as (model, engine, optimizer):
        losses = [step_of(model, optimizer, step, optimizer.accumulation_steps) for step in range(4)]
        return losses, states_of(engine, model), len(visitors(engine))


@pytest.mark.slow
@pytest.mark.parametrize("options, keeps", [({}, False), ({"max_grad_norm": 0.1}, True)], ids=["backward", "step"])
def test_backward_updates_visitors_unless_updates_follow_step(options, keeps, tmp_path):
    with training(tiny_gpt, tmp_path, device_memory="320KiB", options=options, **SMALL) as (model, engine, optimizer):
        for step in range(3):
            gpt_step(model, optimizer, step)
        model(*tokens(3)).backward()
        found = visitors(engine)
        assert found
        for chunk in found:
            assert chunk.update.is_early != keeps
            assert (chunk.gradient.device_shard is not None) == keeps
        if not keeps:
            assert engine.tier.waiting_nbytes == 0
            name = engine.registry.params[next(iter(found[0].whole_pieces))].name
            with pytest.raises(infinity.UsageError, match="step"), infinity.gathered(model.get_parameter(name)):
                pass
        optimizer.step()


@pytest.mark.few(3)
@pytest.mark.parametrize("device_memory", ["200KiB", "320KiB", "400KiB"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("tie", [False, True])
def test_visitors_have_the_bits_of_records_at_home(tie, dtype, device_memory, tmp_path):
    make = lambda: tiny_gpt(tie=tie)
    losses, states, _ = trained(tmp_path, make=make, dtype=dtype, **AT_HOME)
    found = trained(tmp_path, make=make, dtype=dtype, device_memory=device_memory, **SMALL)
    assert found[2] and found[0] == losses
    assert_same_states(found[1], states)


@pytest.mark.slow
@pytest.mark.parametrize("step_of", [gpt_step, gpt_step_by_layer], ids=["loop", "by layer"])
def test_visitors_of_several_micro_batches_change_no_bit(step_of, tmp_path):
    options = {"accumulation_steps": 3}
    losses, states, _ = trained(tmp_path, step_of, options=options, **AT_HOME)
    found = trained(tmp_path, step_of, options=options, device_memory="400KiB", **SMALL)
    assert found[2] and found[0] == losses
    assert_same_states(found[1], states)


def retaining(model, optimizer, step, num_micro):
    """The graph keeps all weights until the end of the step, so that no update begins in backward."""
    loss = model(*tokens(step))
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    return [loss.item()]


EIGHT_LAYERS = lambda: GPT(hidden=32, layers=8, heads=4, vocab=61, seq=12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "step_of, options, device_kib, host_memory",
    [
        (gpt_step, {}, 900, "128KiB"),
        (retaining, {}, 900, "128KiB"),
        (gpt_step_by_layer, {"accumulation_steps": 3}, 900, "128KiB"),
        (gpt_step_by_layer, {"accumulation_steps": 3}, 2000, "8MiB"),  # all records fit beside the sums of a segment, but not beside all sums
    ],
)
def test_visitors_and_their_gradients_stay_within_device_memory(step_of, options, device_kib, host_memory, tmp_path):
    counts = []
    with training(EIGHT_LAYERS, tmp_path, device_memory=f"{device_kib}KiB", chunk_mib=1 / 512, host_memory=host_memory, options=options) as (
        model,
        engine,
        optimizer,
    ):
        for step in range(5):
            step_of(model, optimizer, step, optimizer.accumulation_steps)
            counts.append(len(engine.device_budget.promoted))
            assert engine.stats()["peak_device_nbytes"] <= device_kib << 10
    assert counts[0] > 0 and len(set(counts)) == 1, counts


def test_more_records_visit_if_their_gradients_need_no_memory(tmp_path):
    num = {
        name: trained(tmp_path / name, device_memory="320KiB", options=options, **SMALL)[2]
        for name, options in (("backward", {}), ("step", {"max_grad_norm": 0.1}))
    }
    assert num["backward"] > num["step"] > 0


@pytest.mark.slow
def test_sums_by_layer_that_do_not_wait_for_step_leave_room_for_visitors(tmp_path):
    num = {
        name: trained(tmp_path / name, gpt_step_by_layer, EIGHT_LAYERS, device_memory="600KiB", options={"accumulation_steps": 3} | options, **SMALL)[2]
        for name, options in (("backward", {}), ("step", {"max_grad_norm": 0.1}))
    }
    assert num["backward"] > 0 == num["step"], num
