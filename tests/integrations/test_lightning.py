"""Lightning's Trainer and Fabric over an engine have the losses, norms and learning rates of plain PyTorch (fp32, to 1e-5)."""

import contextlib
import csv
import json

import pytest
import torch
from torch.utils.data import DataLoader

lightning = pytest.importorskip("lightning")

from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from support.models import tiny_gpt  # noqa: E402
from support.ranks import launch  # noqa: E402

import infinity  # noqa: E402
from infinity.integrations.lightning import EngineFabricStrategy, EngineStrategy, LogStats  # noqa: E402

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]

VOCAB, LENGTH = 61, 12


def config(folder, **changes):
    places = {"swap_dirs": folder, "dtype": "fp32", "device": "cpu", "param_tier": "nvme", "optimizer_state_tier": "nvme"}
    return infinity.Config(**places | {"host_memory": "64MiB", "device_memory": "16MiB"} | changes)


def loader(count, seed=1):
    tokens = torch.randint(VOCAB, (count, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return DataLoader(tokens, batch_size=2)


class Language(lightning.LightningModule):
    """A GPT and a parameter that training_step uses outside all modules."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gpt, self.scale, self.seen = tiny_gpt(), torch.nn.Parameter(torch.ones(1)), []

    def training_step(self, batch, index):
        loss = self.gpt(batch[:, :-1], batch[:, 1:]) * self.scale.square().sum()
        self.seen.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        self.seen.append((self.gpt(batch[:, :-1], batch[:, 1:]) * self.scale.square().sum()).item())

    def on_before_optimizer_step(self, optimizer):
        self.seen.append(torch.nn.utils.get_total_norm([p.grad for p in self.parameters()]).item())
        self.seen.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)), "interval": "step"}]


def fit(folder, strategy="auto", *, resume=None, callbacks=(), **options):
    """Train a Language. Return the module and the trainer."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    quiet |= {"accelerator": "cpu", "devices": 1, "enable_checkpointing": bool(callbacks)}
    options = {"max_epochs": 2, "accumulate_grad_batches": 3, "gradient_clip_val": 1.0} | options
    trainer = lightning.Trainer(default_root_dir=folder, strategy=strategy, callbacks=list(callbacks), **quiet | options)
    module = Language()
    trainer.fit(module, loader(22), loader(6, 2), ckpt_path=resume)
    return module, trainer


CASES = {
    "clipped": {},
    "clipped hard": {"gradient_clip_val": 0.1},
    "one micro-batch": {"accumulate_grad_batches": 1},
    "accumulation that changes": {"accumulate_grad_batches": 1, "callbacks": [lambda: GradientAccumulationScheduler({0: 3, 1: 4})]},
    "one after the other": {"max_epochs": 1, "val_check_interval": 4},
}


@pytest.mark.parametrize("case", CASES)
def test_fit_has_the_numbers_of_a_plain_trainer(case, tmp_path):
    found = []
    for strategy in ("auto", EngineStrategy(config(tmp_path))):
        options = dict(CASES[case])
        callbacks = [make() for make in options.pop("callbacks", ())]
        module, trainer = fit(tmp_path, strategy, callbacks=callbacks, enable_checkpointing=False, **options)
        found.append(module.seen)
    assert found[1] == pytest.approx(found[0], rel=1e-5) and len(found[1]) > 20
    assert isinstance(trainer.optimizers[0], infinity.AdamW) and infinity.engine_of(module).has_started
    module.seen.clear()
    trainer.validate(module, loader(6, 2), verbose=False)
    assert len(module.seen) == 3


def test_a_resumed_run_continues_like_an_uninterrupted_one(tmp_path):
    def keep(folder):
        return ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, every_n_epochs=1)

    expected, _ = fit(tmp_path)
    whole, _ = fit(tmp_path, EngineStrategy(config(tmp_path)), callbacks=[keep(tmp_path / "kept")])
    assert whole.seen == pytest.approx(expected.seen, rel=1e-5)
    infinity.engine_of(whole).close()
    (tmp_path / "kept").rename(tmp_path / "moved")
    again, _ = fit(tmp_path, EngineStrategy(config(tmp_path)), callbacks=[keep(tmp_path / "new")], resume=tmp_path / "moved" / "epoch=0.ckpt")
    assert again.seen == whole.seen[len(whole.seen) // 2 :]
    plain = Language()
    plain.load_state_dict(torch.load(tmp_path / "moved" / "epoch=1.ckpt", weights_only=False)["state_dict"])
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in plain.state_dict().items())


def test_checkpoints_removed_by_lightning_are_removed_completely(tmp_path):
    keep = ModelCheckpoint(tmp_path / "kept", filename="{epoch}", save_top_k=1, every_n_epochs=1)
    fit(tmp_path, EngineStrategy(config(tmp_path)), callbacks=[keep])
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["epoch=1.ckpt", "epoch=1.ckpt.infinity"]


def test_configure_model_can_build_a_model_in_its_engine(tmp_path):
    class Late(Language):
        def configure_model(self):
            if not infinity_has(self.gpt):
                del self.gpt
                torch.manual_seed(0)
                with infinity.init(config(tmp_path)):
                    self.gpt = tiny_gpt()

        def training_step(self, batch, index):
            loss = self.gpt(batch[:, :-1], batch[:, 1:])
            self.seen.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.gpt.parameters(), lr=1e-2)

        on_before_optimizer_step = lightning.LightningModule.on_before_optimizer_step

    def infinity_has(model):
        with contextlib.suppress(infinity.ConfigError):
            return infinity.engine_of(model) is not None
        return False

    module = Late()
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(max_steps=3, accelerator="cpu", devices=1, strategy=EngineStrategy(), **options)
    trainer.fit(module, loader(22))
    torch.manual_seed(0)
    plain, expected = tiny_gpt(), []
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for batch, _ in zip(loader(22), range(3)):
        loss = plain(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert module.seen == pytest.approx(expected, rel=1e-5)


def test_mixed_precision_must_match_the_engine(tmp_path):
    with pytest.raises(infinity.ConfigError, match=r"Trainer\(precision='bf16-mixed'\) over an engine of dtype 'fp32'"):
        fit(tmp_path, EngineStrategy(config(tmp_path)), precision="bf16-mixed")
    expected, _ = fit(tmp_path, precision="bf16-mixed", max_epochs=1)
    module, _ = fit(tmp_path, EngineStrategy(config(tmp_path, dtype="bf16")), precision="bf16-mixed", max_epochs=1)
    assert module.seen == pytest.approx(expected.seen, rel=0.1)


def test_the_trainers_loggers_log_statistics(tmp_path):
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    strategy = EngineStrategy(config(tmp_path, residency="none"))
    fit(tmp_path, strategy, logger=logger, callbacks=[LogStats()], enable_checkpointing=False, log_every_n_steps=1, max_epochs=1)
    with open(tmp_path / "lightning_logs" / "version_0" / "metrics.csv") as file:
        read = [float(row["infinity/links/nvme_read/nbytes"]) for row in csv.DictReader(file) if row["infinity/links/nvme_read/nbytes"]]
    assert len(read) > 2 and read == sorted(read) and read[-1] > read[0] > 0


def by_fabric(strategy, folder, *, micros=3, bound=1.0, told=False, resume=None, steps=4):
    """Run an ordinary loop that saves after two steps. Return losses and norms, and the model."""
    fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    model = tiny_gpt()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    state = {"model": model, "optimizer": optimizer, "number": 0}
    if resume is not None:
        fabric.load(resume, state)
    found = []
    for number in range(state["number"], steps):
        for micro in range(micros):
            last = micro + 1 == micros
            with fabric.no_backward_sync(model, enabled=not last) if told else contextlib.nullcontext():
                batch = next(iter(loader(2, 10 * number + micro)))
                loss = model(batch[:, :-1], batch[:, 1:])
                fabric.backward(loss / micros)
                found.append(loss.item())
        found.append(fabric.clip_gradients(model, optimizer, max_norm=bound).item())
        optimizer.step()
        optimizer.zero_grad()
        if number == 1:
            state["number"] = 2
            fabric.save(folder / "saved.ckpt", state)
    return found, model


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("bound", [0.1, 1.0])
def test_a_fabric_loop_has_the_numbers_of_plain_pytorch(bound, told, tmp_path):
    expected, _ = by_fabric("auto", tmp_path, bound=bound)
    strategy = EngineFabricStrategy(config(tmp_path), accumulation_steps=2 if told else 3)
    found, model = by_fabric(strategy, tmp_path, bound=bound, told=told)
    assert found == pytest.approx(expected, rel=1e-5)
    assert infinity.engine_of(model).has_started


def test_a_fabric_loop_can_be_resumed(tmp_path):
    found, model = by_fabric(EngineFabricStrategy(config(tmp_path), accumulation_steps=3), tmp_path)
    infinity.engine_of(model).close()
    for name in ("saved.ckpt", "saved.ckpt.infinity"):
        (tmp_path / name).rename(tmp_path / f"moved{name[5:]}")
    again, _ = by_fabric(EngineFabricStrategy(config(tmp_path), accumulation_steps=3), tmp_path, resume=tmp_path / "moved.ckpt")
    assert again == found[len(found) // 2 :]


@pytest.mark.long
def test_two_ranks_train_and_resume_as_with_ddp(tmp_path):
    found = {}
    for name, strategy, resume in (
        ("plain", '"ddp"', None),
        ("ours", "EngineStrategy(config(FOLDER))", None),
        ("again", "EngineStrategy(config(FOLDER))", str(tmp_path / "ours" / "kept" / "epoch=0.ckpt")),
    ):
        folder = tmp_path / name
        folder.mkdir()
        ((status, output),) = launch(
            folder,
            f"""
            import json
            import os
            import torch
            from lightning.pytorch.callbacks import ModelCheckpoint
            from test_lightning import EngineStrategy, config, fit

            FOLDER = {str(folder)!r}
            torch.set_num_threads(1)
            keep = ModelCheckpoint(FOLDER + "/kept", filename="{{epoch}}", save_top_k=-1, every_n_epochs=1)
            module, _ = fit(FOLDER, {strategy}, devices=2, callbacks=[keep], resume={resume!r})
            open(FOLDER + "/seen" + os.environ["RANK"], "w").write(json.dumps(module.seen))
            """,
            seconds=300,
        )
        assert status == 0, output[-4000:]
        found[name] = [json.loads((folder / f"seen{rank}").read_text()) for rank in range(2)]
    losses = lambda seen: [value for value in seen if value > 2]  # DDP: norms before the reduction differ by rank
    for plain, ours, again in zip(*found.values()):
        assert losses(ours) == pytest.approx(losses(plain), rel=1e-5)
        assert again == ours[len(ours) // 2 :]
