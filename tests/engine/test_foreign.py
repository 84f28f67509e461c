"""Parts of PyTorch and of other libraries that meet an engine. They work, or are refused with a remedy that works."""

import contextlib
import copy
import gc

import pytest
import torch
from support.helpers import NVME, ReferenceAdamW, assert_same_bits
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

import infinity
from infinity.errors import ConfigError, UsageError

H = 32
CONFIG = {"device": "cpu", "dtype": "fp32", "chunk_mib": 1 / 512, "host_memory": "64MiB", **NVME}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(H, H), nn.Tanh(), nn.Linear(H, H))


def train(model, optimizer, steps=2):
    losses = []
    for step in range(steps):
        loss = (model(torch.full((4, H), step + 1.0)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def expected_losses(steps=2):
    model = net()
    return train(model, ReferenceAdamW(model.parameters(), lr=0.01), steps)


@pytest.fixture
def config(tmp_path):
    return infinity.Config(swap_dirs=tmp_path, **CONFIG)


@pytest.fixture
def group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


# Optimizers


@pytest.mark.few(1)
@pytest.mark.parametrize("kind, ours", [("AdamW", "AdamW"), ("SGD", "SGD"), ("LBFGS", "AdamW")])
def test_an_optimizer_of_torch_is_refused_at_the_first_forward_pass(kind, ours, config):
    model = net()
    with infinity.offload(model, config) as engine:
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
        with pytest.raises(UsageError, match=rf"torch.optim.{kind} was made over 0.weight.* Make infinity.{ours}\(model.parameters"):
            model(torch.ones(4, H))
        assert not engine.has_started
        del optimizer
        train(model, getattr(infinity, ours)(model.parameters(), lr=0.01))


def test_a_garbage_optimizer_of_torch_is_ignored(config):
    model = net()
    with infinity.offload(model, config):
        gc.disable()
        try:
            optimizer = torch.optim.AdamW(model.parameters())
            optimizer.itself = optimizer
            del optimizer
            model(torch.ones(4, H))
        finally:
            gc.enable()


def test_a_later_optimizer_of_torch_is_refused_in_backward(config):
    model = net()
    with infinity.offload(model, config):
        model(torch.ones(4, H))
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(UsageError, match="torch.optim.AdamW was made over .*Make infinity.AdamW"):
            model(torch.ones(4, H)).sum().backward()
        del optimizer
        train(model, infinity.AdamW(model.parameters()))


def test_training_without_an_optimizer_is_refused_with_two_remedies(config):
    model = net()
    with infinity.offload(model, config):
        prompt = torch.ones(4, H, requires_grad=True)
        with pytest.raises(UsageError, match=r"brings a gradient to 2.bias.*Make infinity.AdamW.*model.requires_grad_\(False\)"):
            model(prompt).sum().backward()
        model.requires_grad_(False)
        model(prompt).sum().backward()
        assert prompt.grad.abs().sum() > 0


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "kind, argument, said",
    [
        ("AdamW", "momentum", "infinity.AdamW has no argument 'momentum'. The arguments are lr, betas, eps, weight_decay, max_grad_norm"),
        ("AdamW", "amsgrad", "infinity.AdamW has no argument 'amsgrad'. The arguments are lr, betas"),
        ("SGD", "weight_deacy", "infinity.SGD has no argument 'weight_deacy'. Did you mean weight_decay?"),
        ("Adam", "fused", "infinity.Adam has no argument 'fused'. Leave the argument out"),
        ("Lion", "accumulation_step", "infinity.Lion has no argument 'accumulation_step'. Did you mean accumulation_steps?"),
    ],
)
def test_an_unknown_optimizer_argument_is_named_with_its_class(kind, argument, said, config):
    model = net()
    with infinity.offload(model, config):
        with pytest.raises(TypeError) as refusal:
            getattr(infinity, kind)(model.parameters(), **{argument: 1})
        assert str(refusal.value).startswith(said)
        train(model, getattr(infinity, kind)(model.parameters()))


def test_an_optimizer_over_only_empty_parameters_is_refused(config):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(0, 0))
    with infinity.offload(model, config):
        with pytest.raises(ConfigError, match="no parameter of the optimizer can be updated"):
            infinity.AdamW(model[1].parameters())
        infinity.AdamW(model.parameters())


# Wrappers


@pytest.mark.parametrize("started", [False, True])
def test_ddp_is_refused_and_the_model_itself_still_trains(started, config, group):
    model = net()
    with infinity.offload(model, config):
        optimizer = infinity.AdamW(model.parameters(), lr=0.01) if started else None
        with pytest.raises(UsageError, match="DistributedDataParallel copies a whole model.* call the model itself"):
            DistributedDataParallel(model)
        optimizer = optimizer or infinity.AdamW(model.parameters(), lr=0.01)
        assert train(model, optimizer) == expected_losses()


def test_data_parallel_is_refused_if_there_are_devices(config, monkeypatch):
    model = net()
    with infinity.offload(model, config):
        optimizer = infinity.AdamW(model.parameters(), lr=0.01)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        with pytest.raises(UsageError, match="DataParallel copies a whole model.* call the model itself"):
            DataParallel(model)
        monkeypatch.undo()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert train(DataParallel(model), optimizer) == expected_losses()  # without devices, DataParallel calls the module


def test_a_wrapper_is_refused_and_its_module_accepted(config, group):
    wrapped = DistributedDataParallel(net())
    with pytest.raises(UsageError, match="give the engine the wrapped model, `.module`"):
        infinity.offload(wrapped, config)
    model = wrapped.module
    del wrapped
    with infinity.offload(model, config):
        assert train(model, infinity.AdamW(model.parameters(), lr=0.01)) == expected_losses()
    DistributedDataParallel(net())  # a model without an engine may be wrapped


def test_an_engine_used_as_its_model_is_an_error_with_a_remedy(config):
    model = infinity.offload(net(), config)
    for use in (lambda: model.parameters(), lambda: model.train(), lambda: model.state_dict()):
        with pytest.raises(AttributeError, match=r"the model has it.* write `infinity.offload\(model, config\)` without `model = `"):
            use()
    with pytest.raises(UsageError, match="an Engine is not called: the model has it"):
        model(torch.ones(4, H))
    with pytest.raises(AttributeError, match="^'Engine' object has no attribute 'nonsense'$"):
        model.nonsense
    model.close()
    model = net()
    infinity.offload(model, config)
    assert train(model, infinity.AdamW(model.parameters(), lr=0.01)) == expected_losses()
    infinity.engine_of(model).close()


def test_jit_trace_is_refused_but_works_on_a_plain_model_with_the_values(config):
    model = net()
    with infinity.offload(model, config):
        train(model, infinity.AdamW(model.parameters()))
        with pytest.raises(UsageError, match=r"torch.jit.trace .*plain.load_state_dict\(model.state_dict\(\)\)"):
            torch.jit.trace(model, torch.ones(4, H))
        (plain := net()).load_state_dict(model.state_dict())
        with torch.no_grad():
            expected = model(torch.ones(4, H))
        assert torch.equal(torch.jit.trace(plain, torch.ones(4, H))(torch.ones(4, H)), expected)


def test_a_shallow_copy_of_a_model_is_refused(config):
    model = net()
    with infinity.offload(model, config):
        optimizer = infinity.AdamW(model.parameters(), lr=0.01)
        with pytest.raises(UsageError, match="this Sequential is a copy, by copy.copy, .* load the first model's state_dict"):
            copy.copy(model)(torch.ones(4, H))
        assert train(model, optimizer) == expected_losses()


# Libraries


def gpt(tie):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 50, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, tie_word_embeddings=tie)).eval()


def language_loss(model):
    tokens = torch.arange(12).view(2, 6)
    return model(input_ids=tokens, labels=tokens).loss


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("how", ["offload", "init"])
@pytest.mark.parametrize("tie", [True, False])
def test_embeddings_are_resized_before_the_engine_starts_or_refused(tie, how, config):
    def resized(when):
        with infinity.init(config) if how == "init" else contextlib.nullcontext():
            model = gpt(tie)
            if when == "before":
                model.resize_token_embeddings(60)
        engine = infinity.offload(model, config) if how == "offload" else infinity.engine_of(model)
        with engine:
            if when == "after offload":
                model.resize_token_embeddings(60)
            optimizer = infinity.AdamW(model.parameters())
            if when == "after the start":
                with infinity.gathered(model.parameters()):
                    model.resize_token_embeddings(60)
            language_loss(model).backward()
            optimizer.step()
            return {name: tuple(value.shape) for name, value in model.state_dict().items() if "wte" in name or "lm_head" in name}

    first = r"before infinity.offload\(model, config\), or inside `with infinity.init\(config\):`"
    with pytest.raises(UsageError, match=rf"transformer.wte.weight was given data of shape \(60, 16\), as by resize.*{first}"):
        resized("after the start")
    for when in ("before", "after offload"):
        assert set(resized(when).values()) == {(60, 16)}


def test_adapters_are_merged_inside_gathered_and_refused_outside(config):
    peft = pytest.importorskip("peft")

    def adapted():
        options = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True, "init_lora_weights": False}
        return peft.get_peft_model(gpt(True), peft.LoraConfig(**options))

    reference = adapted()
    expected = language_loss(reference)
    model = adapted()
    with infinity.offload(model, config):
        infinity.AdamW([param for param in model.parameters() if param.requires_grad])
        with torch.no_grad():
            assert language_loss(model) == expected
        with pytest.raises(UsageError, match=r"lora_B.default.weight has no value here.*inside `with infinity.gathered"):
            model.merge_and_unload()
        with infinity.gathered(model.parameters()):
            merged = model.merge_and_unload()
        with torch.no_grad():
            assert language_loss(merged) == pytest.approx(expected.item(), rel=1e-5)
        assert not any("lora" in name for name in merged.state_dict())
