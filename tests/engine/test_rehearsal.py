"""Kernels are compiled before the first step: a small update of each format runs on the device. Errors there do not reach the program."""

import pytest
import torch
from support.helpers import assert_same_states, on_gpu, states_of, training
from support.models import gpt_step, tiny_gpt

import infinity
from infinity.formats.format import Format
from infinity.optim.rules import AdamRule, LionRule, SGDRule
from infinity.tiers import updates
from infinity.tiers.arithmetic import rehearse

GROUP = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "momentum": 0.9, "dampening": 0.0, "nesterov": False}


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "bf16 bf16", "bf16 8bit", "bf16_rounded 8bit", "fp16", "fp32"])
@pytest.mark.parametrize("rule", [AdamRule(True), AdamRule(False), SGDRule(True), LionRule()], ids=lambda rule: type(rule).__name__)
def test_adam_updates_a_shard_of_each_format(rule, dtype, accumulates, monkeypatch):
    seen, apply = [], type(rule).apply
    monkeypatch.setattr(type(rule), "apply", lambda self, shard, *args, **options: seen.append(shard) or apply(self, shard, *args, **options))
    name, _, moments = dtype.partition(" ")
    format = Format(name, True, rule.moments, moments or "fp32", accumulates)
    rehearse([format], [(rule, GROUP)], torch.device("cpu"))
    if isinstance(rule, AdamRule):
        assert [shard.format for shard in seen] == [format] and set(seen[0]) == {segment.name for segment in format.segments}
    else:
        assert not seen


def test_an_error_of_the_rehearsal_reaches_nobody(monkeypatch, tmp_path):
    ran = []

    def fail(*args):
        ran.append(args)
        raise RuntimeError("no compiler")

    monkeypatch.setattr(updates, "rehearse", fail)
    found = []
    for device in ("cuda", "cpu"):
        with training(tiny_gpt, tmp_path, options={"max_grad_norm": 0.5}) as (model, engine, optimizer):
            engine.gradients.device = torch.device(device)  # only `Updater.rehearse` looks there
            engine.updater.rehearse(engine.optimizers)
            engine.updater.drain()
            engine.gradients.device = torch.device("cpu")
            assert len(ran) == 1
            gpt_step(model, optimizer, 0)
            found.append(states_of(engine, model))
    assert_same_states(*found)


@on_gpu
def test_an_engine_on_a_gpu_compiles_its_kernels_at_the_start(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(updates, "rehearse", lambda *args: seen.append(args) or rehearse(*args))
    with training(tiny_gpt, tmp_path, device="cuda", dtype="bf16", optimizer=infinity.AdamW) as (model, engine, optimizer):
        engine.start()
        engine.updater.drain()
        (formats, rules, device), = seen
        assert formats == {chunk.record.format for chunk in engine.registry.chunks} and device.type == "cuda"
        assert rules == [(optimizer.rule, optimizer.param_groups[0])]
