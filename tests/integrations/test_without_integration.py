"""Trainers of other libraries without the integration are refused before the first step, with the lines to write."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
lightning = pytest.importorskip("lightning")

from support.trainers import arguments, engine_config, llama, rows  # noqa: E402

import infinity  # noqa: E402
from infinity.engine import refused_trainers as trainers  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "devices": 1}


class Wrapped(nn.Module):
    """A module around a model, such as one that adds a loss."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **batch):
        return self.model(**batch)


class Module(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, index):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return infinity.AdamW(self.model.parameters())


def by_trainer(model, folder):
    args = arguments(folder / "run", gradient_accumulation_steps=1, save_strategy="steps", save_steps=1)
    optimizers = (infinity.AdamW(model.parameters(), max_grad_norm=1.0), None)
    transformers.Trainer(model=model, args=args, train_dataset=rows(8), optimizers=optimizers).train()


def by_trainer_without_an_optimizer(model, folder):
    args = arguments(folder / "run", max_grad_norm=0)
    transformers.Trainer(model=model, args=args, train_dataset=rows(8)).train()


def by_accelerator(model, folder, wrap=lambda model: model):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    prepared, optimizer = accelerator.prepare(wrap(model), infinity.AdamW(model.parameters()))
    for batch in DataLoader(rows(8), batch_size=2):
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()


def by_accelerator_and_a_wrapper(model, folder):
    by_accelerator(model, folder, Wrapped)


def by_lightning(model, folder):
    trainer = lightning.Trainer(default_root_dir=folder, max_epochs=1, accumulate_grad_batches=2, **QUIET)
    trainer.fit(Module(model), DataLoader(rows(8), batch_size=2))


def by_fabric(model, folder):
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    prepared, optimizer = fabric.setup(model, infinity.AdamW(model.parameters()))
    fabric.backward(prepared(**rows(1, 6)[0]).loss)


ACCELERATE = ("from infinity.integrations.accelerate import offloaded", "offloaded(Accelerator)(...)")
TRANSFORMERS = ("from infinity.integrations.transformers import offloaded", "offloaded(Trainer)(model=model,")


@pytest.mark.parametrize(
    "drive, lines",
    [
        (by_trainer, TRANSFORMERS),
        (by_trainer_without_an_optimizer, TRANSFORMERS),
        (by_accelerator, ACCELERATE),
        (by_accelerator_and_a_wrapper, ACCELERATE),
        (by_lightning, ("from infinity.integrations.lightning import EngineStrategy", "strategy=EngineStrategy(config)")),
        (by_fabric, ("from infinity.integrations.lightning import EngineFabricStrategy", "strategy=EngineFabricStrategy(config)")),
    ],
)
def test_a_trainer_without_integration_is_refused_before_its_first_step(drive, lines, tmp_path):
    (tmp_path / "swap").mkdir()
    model = llama()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with infinity.offload(model, engine_config(tmp_path / "swap")):
        with pytest.raises(infinity.UsageError) as refusal:
            drive(model, tmp_path)
        assert all(line in str(refusal.value) for line in lines)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not list(tmp_path.rglob("checkpoint*"))


def test_older_package_names_of_lightning_are_refused(tmp_path):
    model = nn.Linear(4, 4)
    with infinity.offload(model, engine_config(tmp_path)) as engine:
        for name, title in ("pytorch_lightning.loops.fit_loop", "Trainer of Lightning"), ("lightning_fabric.wrappers", "Fabric of Lightning"):
            names = {"__name__": name, "refuse": trainers.refuse_trainers, "engine": engine}
            with pytest.raises(infinity.UsageError, match=title):
                exec("refuse(engine)", names)
        exec("refuse(engine)", {"__name__": "lightnings", "refuse": trainers.refuse_trainers, "engine": engine})


def test_a_plain_trainer_may_evaluate_beside_an_ordinary_loop(tmp_path):
    model = llama()
    with infinity.offload(model, engine_config(tmp_path)):
        optimizer = infinity.AdamW(model.parameters())
        trainer = transformers.Trainer(model=model, args=arguments(tmp_path / "run"), eval_dataset=rows(4))
        assert trainer.evaluate()["eval_loss"] > 0
        model(input_ids=rows(1)[0]["input_ids"][None], labels=rows(1)[0]["labels"][None]).loss.backward()
        optimizer.step()


def test_helpers_of_accelerate_may_run_an_ordinary_loop(tmp_path):
    def train(batch_size=2):
        model = nn.Linear(4, 4)
        with infinity.offload(model, engine_config(tmp_path)):
            optimizer = infinity.AdamW(model.parameters())
            model(torch.ones(batch_size, 4)).sum().backward()
            optimizer.step()
            return infinity.engine_of(model).cycle.has_stepped

    assert accelerate.utils.find_executable_batch_size(train, starting_batch_size=2)()
    accelerate.notebook_launcher(train, num_processes=1)
