"""PEFT adapters added before or after the engine give the losses and merged weights of plain PyTorch."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from support.trainers import engine_config, llama, rows  # noqa: E402

import infinity  # noqa: E402
from infinity.integrations.peft import merge_and_unload  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

ADAPTERS = {
    "lora": lambda: peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]),
    "rank-stabilised, all layers": lambda: peft.LoraConfig(r=4, use_rslora=True, target_modules="all-linear"),
    "dora": lambda: peft.LoraConfig(r=4, use_dora=True, target_modules=["q_proj", "v_proj"]),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "saved modules": lambda: peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]),
}


def adapted(model, adapter):
    torch.manual_seed(3)
    model = peft.get_peft_model(model, ADAPTERS[adapter]())
    for name, param in model.named_parameters():  # B is zero at first, and a merge would change no weight
        if "lora_B" in name:
            with torch.no_grad():
                param.copy_(torch.randn(param.shape) / 50)
    return model


def batch(step):
    tokens = torch.stack([row["input_ids"] for row in rows(4, seed=step)])
    return {"input_ids": tokens, "labels": tokens}


def train(model, optimizer, steps=3):
    losses = []
    for step in range(steps):
        loss = model(**batch(step)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(make, order, adapter, config):
    """Train a base with adapters, in an engine made first, last or together with the base. Return losses and model."""
    if order == "plain":
        model = adapted(make(), adapter)
        return train(model, torch.optim.AdamW(trainable(model), lr=1e-2)), model
    if order == "adapters first":
        model = adapted(make(), adapter)
        infinity.offload(model, config)
    elif order == "engine first":
        base = make()
        infinity.offload(base, config)
        model = adapted(base, adapter)
    else:
        with infinity.init(config):
            base = make()
        model = adapted(base, adapter)
    return train(model, infinity.AdamW(trainable(model), lr=1e-2, max_grad_norm=torch.inf)), model


def trainable(model):
    return [param for param in model.parameters() if param.requires_grad]


@pytest.mark.slow
@pytest.mark.few(6)
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("order", ["adapters first", "engine first", "init first"])
def test_adapters_and_engine_may_be_made_in_any_order(order, adapter, tmp_path):
    expected, plain = trained(llama, "plain", adapter, None)
    losses, model = trained(llama, order, adapter, engine_config(tmp_path))
    assert losses == pytest.approx(expected, rel=1e-5)
    found = model.state_dict()
    assert list(found) == list(plain.state_dict())
    assert all(infinity.engine_of(model).manages(param) for param in model.parameters())
    infinity.save(tmp_path / "saved", model, infinity.engine_of(model).optimizer)
    plain, merged = plain.merge_and_unload(), merge_and_unload(model)
    assert type(merged) is type(plain)
    with torch.no_grad():
        assert merged(**batch(9)).loss.item() == pytest.approx(plain(**batch(9)).loss.item(), rel=1e-5)
    for name, value in merged.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_adapters_can_be_saved_and_loaded_beside_the_engine(tmp_path):
    _, model = trained(llama, "engine first", "lora", engine_config(tmp_path))
    model.save_pretrained(tmp_path / "adapters")
    again = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapters")
    with torch.no_grad():
        assert model(**batch(9)).loss.item() == pytest.approx(again(**batch(9)).loss.item(), rel=1e-5)
    (tmp_path / "other").mkdir()
    base = llama()
    engine = infinity.offload(base, engine_config(tmp_path / "other"))
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    with torch.no_grad():
        assert loaded(**batch(9)).loss.item() == pytest.approx(again(**batch(9)).loss.item(), rel=1e-5)
    assert all(map(engine.manages, loaded.parameters()))
    engine.close()


def test_adapters_added_after_the_start_are_refused_by_name(tmp_path):
    base = llama()
    with infinity.offload(base, engine_config(tmp_path)):
        with torch.no_grad():
            base(**batch(0))
        model = peft.get_peft_model(base, ADAPTERS["lora"]())
        with pytest.raises(infinity.ConfigError, match="became the model's after the engine had started"):
            infinity.AdamW(trainable(model))
