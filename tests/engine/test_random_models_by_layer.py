"""Random models have the bits of the ordinary loop in `infinity.accumulate`. The test id has the seed, so `pytest -k` repeats a failure."""

import functools
import random

import pytest
from support.helpers import assert_same_states, states_of, training
from support.random_models import Stack, batch, loss_of

import infinity

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_STEPS = 3


def run(seed, by_layer, directory):
    """Losses and states after some steps."""
    draw = random.Random(1000 + seed)
    config = {
        "dtype": draw.choice(["fp32", "bf16"]),
        "param_tier": draw.choice(["nvme", "nvme", "host", "auto"]),
        "optimizer_state_tier": draw.choice(["nvme", "host"]),
        "residency": draw.choice(["none", "auto"]),
        "chunk_mib": draw.choice([1 / 512, 1 / 128, 1 / 64]),
        "update": draw.choice(["auto", "deferred"]),
    }
    num = draw.choice([2, 3, 5])
    options = {"accumulation_steps": num, "max_grad_norm": draw.choice([None, 0.05]), "lr": 1e-2}
    losses = []
    with training(functools.partial(Stack, seed, 2), directory, options=options, **config) as (model, engine, optimizer):
        for step in range(NUM_STEPS):
            batches = [batch(100 * seed + 10 * step + number) for number in range(num)]

            def loss(model, given, step=step):
                return loss_of(model(given[0], step), given[1], num)

            if by_layer:
                losses += [value.item() for value in infinity.accumulate(model, batches, loss)]
            else:
                for given in batches:
                    value = loss(model, given)
                    value.backward()
                    losses.append(value.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses, states_of(engine, model)


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(100))
def test_a_random_model_trained_layer_wise_has_the_bits_of_the_loop(seed, tmp_path):
    expected_losses, expected = run(seed, False, tmp_path)
    losses, states = run(seed, True, tmp_path)
    assert losses == expected_losses
    assert_same_states(states, expected, seed)
