"""transformers' Trainer over an engine has the losses and norms of plain PyTorch (fp32, to 1e-5)."""

import json

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from support.ranks import launch  # noqa: E402
from support.trainers import arguments, assert_equal_lines, engine_config, llama, logged, rows  # noqa: E402

import infinity  # noqa: E402
from infinity.integrations.optimizers import counterpart  # noqa: E402
from infinity.integrations.transformers import offloaded  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def run(kind, folder, model=None, *, resume=None, **changes):
    changes = {"eval_strategy": "epoch"} | changes
    trainer = kind(model=model or llama(), args=arguments(folder, **changes), train_dataset=rows(22), eval_dataset=rows(6, seed=2))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights_of(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


CASES = {
    "clipped": {"max_grad_norm": 1.0},
    "clipped hard": {"max_grad_norm": 0.1},
    "not clipped": {"max_grad_norm": 0.0},
    "one micro-batch": {"gradient_accumulation_steps": 1, "max_steps": 6, "eval_strategy": "no"},
    "noisy embeddings": {"neftune_noise_alpha": 5.0},
    "checkpointed": {"gradient_checkpointing": True},
    "sgd": {"optim": "sgd", "learning_rate": 1.0},
    "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager", "max_steps": 2, "eval_strategy": "no"},
    "decay and warm-up": {"weight_decay": 0.1, "warmup_steps": 3, "lr_scheduler_type": "cosine"},
}


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("case", CASES)
def test_losses_and_norms_equal_those_of_a_plain_trainer(case, tmp_path):
    expected = run(transformers.Trainer, tmp_path / "plain", **CASES[case])
    found = run(offloaded(transformers.Trainer, engine_config(tmp_path)), tmp_path / "ours", **CASES[case])
    assert_equal_lines(logged(found), logged(expected))
    assert infinity.engine_of(found.model).has_started


@pytest.mark.slow
def test_a_resumed_run_continues_like_an_uninterrupted_one(tmp_path):
    kind = offloaded(transformers.Trainer, engine_config(tmp_path))
    options = {"save_strategy": "epoch", "neftune_noise_alpha": 5.0}
    expected = run(transformers.Trainer, tmp_path / "plain", **options)
    whole = run(kind, tmp_path / "ours", **options)
    before, lines = weights_of(whole), logged(whole)
    infinity.engine_of(whole.model).close()
    (tmp_path / "ours" / "checkpoint-4").rename(tmp_path / "moved")
    torch.manual_seed(99)
    again = run(kind, tmp_path / "again", transformers.LlamaForCausalLM(whole.model.config), resume=str(tmp_path / "moved"), **options)
    assert_equal_lines(logged(again), logged(expected))
    assert logged(again) == lines
    assert all(torch.equal(value, before[name]) for name, value in weights_of(again).items())


@pytest.mark.slow
def test_the_best_model_is_loaded_at_the_end(tmp_path):
    options = {"save_strategy": "epoch", "load_best_model_at_end": True}
    expected = run(transformers.Trainer, tmp_path / "plain", **options)
    found = run(offloaded(transformers.Trainer, engine_config(tmp_path)), tmp_path / "ours", **options)
    assert expected.state.best_global_step == found.state.best_global_step < found.state.global_step
    assert found.evaluate()["eval_loss"] == pytest.approx(expected.evaluate()["eval_loss"], rel=1e-5)
    plain = transformers.LlamaForCausalLM.from_pretrained(found.state.best_model_checkpoint)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in found.model.state_dict().items())


def test_evaluation_may_run_before_training(tmp_path):
    options = {"args": arguments(tmp_path / "run", max_steps=2), "train_dataset": rows(12), "eval_dataset": rows(6)}
    trainer = offloaded(transformers.Trainer, engine_config(tmp_path))(model=llama(), **options)
    plain = transformers.Trainer(model=llama(), **options)
    for each in (plain, trainer):
        each.evaluate()
        each.train()
        each.predict(rows(4))
    assert_equal_lines(logged(trainer), logged(plain))


def test_a_model_already_in_an_engine_stays_there(tmp_path):
    with infinity.init(engine_config(tmp_path)):
        model = llama()
    engine = infinity.engine_of(model)
    found = run(offloaded(transformers.Trainer), tmp_path / "ours", model)
    assert infinity.engine_of(found.model) is engine
    assert_equal_lines(logged(found), logged(run(transformers.Trainer, tmp_path / "plain")))


def test_model_init_makes_a_new_model_for_each_training(tmp_path):
    """A hyper-parameter search does this. The previous engine ends with its model."""
    trainer = offloaded(transformers.Trainer, engine_config(tmp_path))(
        model_init=llama, args=arguments(tmp_path / "run", max_steps=2), train_dataset=rows(12)
    )
    losses = []
    for _ in range(2):
        trainer.train()
        losses.append([line["loss"] for line in logged(trainer) if "loss" in line])
    assert losses[0] == losses[1]


def test_mixed_precision_must_match_the_engine(tmp_path):
    found = run(offloaded(transformers.Trainer, engine_config(tmp_path, dtype="bf16")), tmp_path / "ours", bf16=True)
    expected = run(transformers.Trainer, tmp_path / "plain", bf16=True)
    for ours, theirs in zip(logged(found), logged(expected), strict=True):
        assert ours == pytest.approx(theirs, rel=0.05)
    (tmp_path / "other").mkdir()
    with pytest.raises(infinity.ConfigError, match=r"TrainingArguments\(bf16=True\) over an engine of dtype 'fp32'"):
        run(offloaded(transformers.Trainer, engine_config(tmp_path / "other")), tmp_path / "ours", bf16=True)


def test_statistics_are_logged_once_per_step(tmp_path):
    seen = []

    class Sees(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs, **options):
            seen.append(logs)

    trainer = offloaded(transformers.Trainer, engine_config(tmp_path, residency="none"), log_stats=True)(
        model=llama(), args=arguments(tmp_path / "run", max_steps=4), train_dataset=rows(24), callbacks=[Sees()]
    )
    trainer.train()
    steps = [logs for logs in seen if "loss" in logs]
    assert len(steps) == 4 and all(isinstance(value, (int, float)) for value in steps[1].values())
    assert steps[3]["infinity/links/nvme_read/nbytes"] > steps[0]["infinity/links/nvme_read/nbytes"] > 0  # a prefetch may move reads to an earlier step
    assert steps[1]["infinity/device_nbytes"] >= 0 and "infinity/loss_scale" not in steps[1]


def test_an_optimizer_without_a_counterpart_is_refused(tmp_path):
    with pytest.raises(infinity.ConfigError, match="Adafactor.*adamw_torch"):
        run(offloaded(transformers.Trainer, engine_config(tmp_path)), tmp_path / "ours", optim="adafactor")
    with pytest.raises(infinity.ConfigError, match="amsgrad"):
        counterpart(torch.optim.AdamW, {"lr": 1.0, "amsgrad": True})
    assert counterpart(torch.optim.SGD, {"lr": 1.0, "foreach": True}) == (infinity.SGD, {"lr": 1.0})
    assert counterpart(infinity.Lion, {"lr": 1.0}) == (infinity.Lion, {"lr": 1.0})


def test_a_subclass_of_trainer_keeps_its_name_and_overrides(tmp_path):
    class Mine(transformers.Trainer):
        def compute_loss(self, model, inputs, **options):
            return super().compute_loss(model, inputs, **options) * 0

    made = offloaded(Mine, engine_config(tmp_path))
    assert made.__name__ == "Mine" and made.__qualname__ == Mine.__qualname__ and issubclass(made, Mine)
    found = run(made, tmp_path / "ours", max_steps=2, eval_strategy="no")
    assert {line["grad_norm"] for line in logged(found) if "grad_norm" in line} == {0.0}


def on_two_ranks(folder, kind, steps, resume):
    """Lines logged by a Trainer on two ranks in new processes. The Trainer saves each epoch and loads the best model."""
    source = f"""
        import json
        import torch
        from support.trainers import arguments, engine_config, llama, logged, rows
        from transformers import Trainer
        from infinity.integrations.transformers import offloaded

        torch.set_num_threads(1)
        options = {{"save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True, "ddp_backend": "gloo", "max_steps": {steps}}}
        options["gradient_accumulation_steps"] = 2
        kind = {kind}
        trainer = kind(model=llama(), args=arguments({str(folder / "run")!r}, **options), train_dataset=rows(22), eval_dataset=rows(8, seed=2))
        trainer.train({resume})
        trainer.save_model()
        if trainer.args.should_save:
            open({str(folder / "lines.json")!r}, "w").write(json.dumps(logged(trainer)))
        """
    ((status, output),) = launch(folder, source, seconds=300)
    assert status == 0, output[-4000:]
    return json.loads((folder / "lines.json").read_text())


@pytest.mark.long
def test_two_ranks_train_save_and_resume_as_with_ddp(tmp_path):
    plain, ours = tmp_path / "plain", tmp_path / "ours"
    plain.mkdir()
    ours.mkdir()
    expected = on_two_ranks(plain, "Trainer", 6, None)
    kind = f"offloaded(Trainer, engine_config({str(ours)!r}))"
    assert_equal_lines(on_two_ranks(ours, kind, 6, None), expected)
    assert_equal_lines(on_two_ranks(ours, kind, 6, repr(str(ours / "run" / "checkpoint-3"))), expected)
