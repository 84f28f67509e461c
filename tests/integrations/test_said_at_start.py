"""Every integration prints the start block once, and one line about a dtype that the program did not request."""

import pytest
import torch
from torch.utils.data import DataLoader

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
lightning = pytest.importorskip("lightning")

from support.trainers import arguments, engine_config, llama, rows  # noqa: E402

import infinity  # noqa: E402
from infinity.integrations import accelerate as by_accelerate  # noqa: E402
from infinity.integrations import transformers as by_transformers  # noqa: E402
from infinity.integrations.lightning import EngineFabricStrategy, EngineStrategy  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
CPU = {"accelerator": "cpu", "devices": 1}


class Module(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, index):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters())


def trainer(model, config, folder, precision):
    options = {precision: True} if precision else {}
    args = arguments(folder / "run", max_steps=2, gradient_accumulation_steps=1, **options)
    by_transformers.offloaded(transformers.Trainer, config)(model=model, args=args, train_dataset=rows(4)).train()


def accelerator(model, config, folder, precision):
    options = {"mixed_precision": precision} if precision else {}
    made = by_accelerate.offloaded(accelerate.Accelerator, config)(cpu=True, **options)
    model, optimizer = made.prepare(model, torch.optim.AdamW(model.parameters()))
    for row in DataLoader(rows(2), batch_size=1):
        made.backward(model(**row).loss)
        optimizer.step()
        optimizer.zero_grad()


def lightning_trainer(model, config, folder, precision):
    options = {"precision": {"bf16": "bf16-mixed"}.get(precision, precision)} if precision else {}
    made = lightning.Trainer(strategy=EngineStrategy(config), default_root_dir=folder, max_epochs=1, **QUIET, **CPU, **options)
    made.fit(Module(model), DataLoader(rows(2), batch_size=1))


def fabric(model, config, folder, precision):
    options = {"precision": {"bf16": "bf16-mixed"}.get(precision, precision)} if precision else {}
    made = lightning.Fabric(strategy=EngineFabricStrategy(config), **CPU, **options)
    made.launch()
    model, optimizer = made.setup(model, torch.optim.AdamW(model.parameters()))
    for row in DataLoader(rows(2), batch_size=1):
        made.backward(model(**row).loss)
        optimizer.step()
        optimizer.zero_grad()


TOLD = {
    trainer: ("TrainingArguments without bf16=True or fp16=True", "add bf16=True."),
    accelerator: ("Accelerator(mixed_precision='no')", "add mixed_precision='bf16'."),
    lightning_trainer: ("Trainer(precision='32-true')", "add precision='bf16-mixed'."),
    fabric: ("Fabric(precision='32-true')", "add precision='bf16-mixed'."),
}


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("run", TOLD)
def test_a_run_prints_one_start_block_and_a_line_for_unrequested_bf16(run, precision, tmp_path, caplog, capsys):
    (tmp_path / "swap").mkdir()
    run(llama(), engine_config(tmp_path / "swap", dtype="bf16"), tmp_path, precision)
    (block,) = [record.getMessage() for record in caplog.records if record.name == "infinity.start"]
    assert " parameters (all trainable), on cpu\n" in block and "computes in bf16" in block
    told, remedy = TOLD[run]
    errors = capsys.readouterr().err
    assert errors.count(f"infinity: {told} over an engine of dtype 'bf16': the model computes in bf16, with fp32 masters.") == (not precision)
    assert (remedy in errors and "infinity.Config(dtype='fp32')" in errors) == (not precision)


def test_no_line_if_model_or_engine_have_the_requested_dtype(tmp_path, capsys):
    for number, (kind, dtype) in enumerate(((torch.float32, "fp32"), (torch.bfloat16, "bf16"))):
        accelerate.state.AcceleratorState._reset_state()
        (tmp_path / str(number)).mkdir()
        accelerator(llama().to(kind), engine_config(tmp_path / str(number), dtype=dtype), tmp_path, None)
        assert "over an engine" not in capsys.readouterr().err


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "64-true"])
def test_a_lightning_precision_that_differs_from_the_engine_is_refused(precision, tmp_path):
    with pytest.raises(infinity.ConfigError, match=rf"Fabric\(precision='{precision}'\) over an engine of dtype 'fp32'"):
        fabric(llama(), engine_config(tmp_path), tmp_path, precision)
