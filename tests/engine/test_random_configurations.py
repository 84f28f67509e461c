"""Random configurations have the bits of plain PyTorch. The test id contains the seed, so `pytest -k` repeats a failure."""

import functools
import random

import pytest
import torch
from support.helpers import assert_equals_reference, plain, training
from support.random_models import Stack, batch, loss_of

import infinity

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_STEPS = 4


def configuration(seed):
    """(fields of Config, options of the optimizer, options of the loop)."""
    draw = random.Random(seed)
    dtype = draw.choice(["fp32", "bf16"])
    config = {
        "dtype": dtype,
        "param_tier": draw.choice(["auto", "device", "host", "nvme"]),
        "optimizer_state_tier": draw.choice(["auto", "host", "nvme"]),
        "chunk_mib": draw.choice([1 / 512, 1 / 128, 1 / 64, 1]),
        "residency": draw.choice(["auto", "none"]),
        "update": draw.choice(["auto", "deferred", "backward"]),
        "compression": draw.choice(["auto", "off", "on"]),
        "activation_tier": draw.choice(["auto", "host", "nvme"]),
        "host_memory": draw.choice(["32MiB", "64MiB", "256MiB"]),
        "tile_above": None,
    }
    if config["param_tier"] == "device":
        config["optimizer_state_tier"] = draw.choice(["device", "host", "nvme"])
    options = {
        "lr": draw.choice([1e-3, 1e-2]),
        "weight_decay": draw.choice([0.0, 0.1]),
        "betas": draw.choice([(0.9, 0.999), (0.8, 0.95)]),
    }
    loop = {
        "kind": draw.choice(["AdamW", "Adam"]),
        "parts": draw.choice([1, 1, 2, 3]),
        "max_grad_norm": draw.choice([None, None, 0.05]),
        "evaluates": draw.random() < 0.3,
        "clears_first": draw.random() < 0.5,
        "two_groups": draw.random() < 0.4,
        "saves": draw.random() < 0.3,
    }
    if loop["max_grad_norm"] is not None and config["update"] == "backward":
        config["update"] = "deferred"
    return config, options, loop


def groups_of(model):
    params = [param for param in model.parameters() if param.requires_grad]
    return [{"params": params[::2], "weight_decay": 0.05}, {"params": params[1::2], "lr": 3e-3}] if len(params) > 1 else params


def reference_step(model, reference, step, parts, seed):
    """Losses of all backward passes, and the fp32 sum of gradients of each parameter."""
    losses, sums = [], {}
    for part in range(parts):
        x, y = batch(100 * seed + 10 * step + part)
        loss = loss_of(model(x, step), y, parts)
        loss.backward()
        losses.append(loss.item())
        for param in model.parameters():
            if param.grad is not None:
                sums[param] = param.grad.float() if param not in sums else sums[param] + param.grad.float()
                param.grad = None
    return losses, sums


def train_and_compare(seed, directory):
    config, options, loop = configuration(seed)
    make = functools.partial(Stack, seed)
    groups = groups_of if loop["two_groups"] else None
    model_of_reference, reference = plain(make, dtype=config["dtype"], groups=groups, options=options | {"decoupled": loop["kind"] == "AdamW"})
    ours = options | {"accumulation_steps": loop["parts"], "max_grad_norm": loop["max_grad_norm"]}
    how = {"optimizer": getattr(infinity, loop["kind"]), "groups": groups, "options": ours, **config}
    with training(make, directory, **how) as (model, engine, optimizer):
        for step in range(NUM_STEPS):
            if loop["clears_first"]:
                optimizer.zero_grad()
            losses = []
            for part in range(loop["parts"]):
                x, y = batch(100 * seed + 10 * step + part)
                loss = loss_of(model(x, step), y, loop["parts"])
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            if not loop["clears_first"]:
                optimizer.zero_grad()
            expected, sums = reference_step(model_of_reference, reference, step, loop["parts"], seed)
            assert losses == expected, (seed, step)
            follow(reference, sums, optimizer, loop["max_grad_norm"])
            if loop["evaluates"]:
                x, _ = batch(7000 + step)
                with torch.no_grad():
                    assert torch.equal(model(x, step), model_of_reference(x, step)), (seed, step)
            if loop["saves"] and step == 1:
                infinity.save(directory / "saved", model, optimizer)
                infinity.load(directory / "saved", model, optimizer)
        assert_equals_reference(engine, model, model_of_reference, reference)


def follow(reference, sums, optimizer, max_grad_norm):
    """Update the reference. Clipping uses the engine's norm, which is compared with torch's norm."""
    factor = 1.0
    if max_grad_norm is not None:
        norm = torch.linalg.vector_norm(torch.stack([gradient.double().norm() for gradient in sums.values()])).item()
        assert optimizer.grad_norm == pytest.approx(norm, rel=1e-6)
        factor = min(1.0, max_grad_norm / (optimizer.grad_norm + 1e-6))
    with torch.no_grad():
        for group in reference.param_groups:
            for param in group["params"]:
                if param in sums:
                    reference._update(param, reference.state[param], group, factor, sums[param])


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(300))
def test_a_random_configuration_has_the_bits_of_plain_pytorch(seed, tmp_path):
    train_and_compare(seed, tmp_path)
