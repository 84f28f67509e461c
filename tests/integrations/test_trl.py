"""TRL's SFTTrainer and DPOTrainer over an engine, with and without LoRA, have losses and norms of plain PyTorch (fp32, to 1e-5)."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")

from support.trainers import arguments, assert_equal_lines, engine_config, llama, logged, tokenizer, words  # noqa: E402

import infinity  # noqa: E402
from infinity.integrations.transformers import offloaded  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def texts(count, seed=1):
    return datasets.Dataset.from_dict({"text": words(count, 12, seed)})


def pairs(count, seed=1):
    columns = {name: words(count, 6, seed + number) for number, name in enumerate(("prompt", "chosen", "rejected"))}
    return datasets.Dataset.from_dict(columns)


def sft(change, folder, model=None, **options):
    options, given = split(options)
    args = arguments(folder, trl.SFTConfig, bf16=False, max_length=16, eval_strategy="epoch", **options)
    return change(trl.SFTTrainer)(model or llama(), args, train_dataset=texts(22), eval_dataset=texts(6, 2), processing_class=tokenizer(), **given)


def dpo(change, folder, model=None, **options):
    options, given = split(options)
    if "peft_config" not in given:
        given["ref_model"] = llama()
    args = arguments(folder, trl.DPOConfig, bf16=False, max_length=16, eval_strategy="epoch", **options)
    return change(trl.DPOTrainer)(model or llama(), args=args, train_dataset=pairs(22), eval_dataset=pairs(6, 5), processing_class=tokenizer(), **given)


def split(options):
    given = {name: options.pop(name) for name in ("peft_config",) if name in options}
    return {"max_grad_norm": 1.0} | options, given


def lora():
    return peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def plain(kind):
    return kind


KINDS = {"sft": sft, "dpo": dpo}
CASES = {
    "clipped": {},
    "clipped hard": {"max_grad_norm": 0.1},
    "noisy embeddings": {"neftune_noise_alpha": 5.0},
    "lora": {"peft_config": lora},
}


@pytest.mark.few(5)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_norms_equal_those_of_a_plain_trainer(kind, case, tmp_path):
    found = []
    for change in (plain, lambda base: offloaded(base, engine_config(tmp_path))):
        options = {name: value() if callable(value) else value for name, value in CASES[case].items()}
        trainer = KINDS[kind](change, tmp_path / "run", **options)
        trainer.train()
        found.append(logged(trainer))
    assert_equal_lines(found[1], found[0])
    assert infinity.engine_of(trainer.model).has_started


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_with_adapters_can_resume_and_load_the_best_ones(kind, tmp_path):
    options = {"save_strategy": "epoch", "load_best_model_at_end": True}
    lines, weights = [], []
    for resume in (None, None, str(tmp_path / "run" / "checkpoint-4")):
        change = plain if not lines else lambda base: offloaded(base, engine_config(tmp_path))
        trainer = KINDS[kind](change, tmp_path / "run", peft_config=lora(), **options)
        trainer.train(resume_from_checkpoint=resume)
        lines.append(logged(trainer))
        weights.append(trainer.model.state_dict())
        if len(lines) > 1:
            infinity.engine_of(trainer.model).close()
    assert_equal_lines(lines[1], lines[0])
    assert_equal_lines(lines[2], lines[0])
    assert lines[1] == lines[2]
    assert weights[1].keys() == weights[0].keys()
    for name, value in weights[1].items():
        torch.testing.assert_close(value, weights[0][name], rtol=1e-4, atol=1e-5)
        assert torch.equal(value, weights[2][name]), name


def test_a_bf16_default_over_an_fp32_engine_is_named(tmp_path):
    args = arguments(tmp_path / "run", trl.SFTConfig)
    with pytest.raises(infinity.ConfigError, match="such as those of TRL, set bf16=True"):
        offloaded(trl.SFTTrainer, engine_config(tmp_path))(llama(), args, train_dataset=texts(4), processing_class=tokenizer())
    args = arguments(tmp_path / "run", trl.SFTConfig, max_steps=2)
    trainer = offloaded(trl.SFTTrainer, engine_config(tmp_path, dtype="bf16"))(
        llama(), args, train_dataset=texts(12), processing_class=tokenizer(), peft_config=lora()
    )
    trainer.train()
    assert trainer.state.global_step == 2
