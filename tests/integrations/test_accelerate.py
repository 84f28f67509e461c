"""accelerate's Accelerator over an engine has the losses, norms and learning rates of plain PyTorch (fp32, to 1e-5)."""

import json

import pytest
import torch

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from support.ranks import launch  # noqa: E402
from support.trainers import engine_config, llama, rows  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import infinity  # noqa: E402
from infinity.integrations.accelerate import offloaded  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def prepared(kind, micros=3, optimizer=torch.optim.AdamW, **options):
    """An Accelerator and prepared objects. 11 batches: the last window of an epoch is short."""
    accelerate.state.AcceleratorState._reset_state()
    accelerator = kind(cpu=True, gradient_accumulation_steps=micros, **options)
    model = llama()
    optimizer = optimizer(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    loader = DataLoader(rows(22), batch_size=2)
    return accelerator, *accelerator.prepare(model, optimizer, loader, scheduler)


def epoch(accelerator, model, optimizer, loader, scheduler, bound=1.0):
    found = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            found.append(loss.item())
            if accelerator.sync_gradients:
                found += [accelerator.clip_grad_norm_(model.parameters(), bound).item(), scheduler.get_last_lr()[0]]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return found


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("bound", [0.1, 1.0])
@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.filterwarnings("error:.*lr_scheduler")
def test_an_ordinary_loop_trains_as_in_plain_pytorch(micros, bound, tmp_path):
    plain = prepared(accelerate.Accelerator, micros)
    expected = [*epoch(*plain, bound), *epoch(*plain, bound)]
    ours = prepared(offloaded(accelerate.Accelerator, engine_config(tmp_path)), micros)
    assert [*epoch(*ours, bound), *epoch(*ours, bound)] == pytest.approx(expected, rel=1e-5)
    assert infinity.engine_of(ours[1]).has_started and isinstance(ours[2].optimizer, infinity.AdamW)


@pytest.mark.slow
def test_states_can_be_saved_and_loaded(tmp_path):
    plain = prepared(accelerate.Accelerator)
    expected = [*epoch(*plain), *epoch(*plain)]
    kind = offloaded(accelerate.Accelerator, engine_config(tmp_path))
    ours = prepared(kind)
    first = epoch(*ours)
    ours[0].save_state(tmp_path / "saved")
    second = epoch(*ours)
    assert [*first, *second] == pytest.approx(expected, rel=1e-5)
    assert not list((tmp_path / "saved").glob("*.safetensors")), "infinity.save stores the weights in a separate folder"
    infinity.engine_of(ours[1]).close()
    (tmp_path / "saved").rename(tmp_path / "moved")
    again = prepared(kind)
    epoch(*again)  # other weights, moments and learning rates
    again[0].load_state(tmp_path / "moved")
    assert epoch(*again) == second
    found = again[0].get_state_dict(again[1])
    assert found.keys() == plain[1].state_dict().keys()


def test_no_sync_marks_passes_if_the_program_accumulates_itself(tmp_path):
    def losses(kind):
        accelerator, model, optimizer, loader, _ = prepared(kind, 2)
        found = []
        for number, batch in enumerate(loader):
            if number % 4 < 3:
                with accelerator.no_sync(model):
                    accelerator.backward(model(**batch).loss)
            else:
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.optimizer.step()
                optimizer.optimizer.zero_grad()
                found.append(loss.item())
        return found

    assert losses(offloaded(accelerate.Accelerator, engine_config(tmp_path))) == pytest.approx(losses(accelerate.Accelerator), rel=1e-5)


def test_a_model_without_trainable_parameters_gets_no_engine(tmp_path):
    accelerator = offloaded(accelerate.Accelerator, engine_config(tmp_path))(cpu=True)
    model = accelerator.prepare(llama().requires_grad_(False))
    with pytest.raises(infinity.ConfigError, match="is in no engine"):
        infinity.engine_of(model)


def test_another_precision_and_an_unknown_optimizer_are_refused(tmp_path):
    with pytest.raises(infinity.ConfigError, match=r"mixed_precision='bf16'\) over an engine of dtype 'fp32'"):
        prepared(offloaded(accelerate.Accelerator, engine_config(tmp_path)), mixed_precision="bf16")
    with pytest.raises(infinity.ConfigError, match="Adagrad.*has no counterpart"):
        prepared(offloaded(accelerate.Accelerator, engine_config(tmp_path)), optimizer=torch.optim.Adagrad)


def test_mixed_precision_must_match_the_engine(tmp_path):
    ours = prepared(offloaded(accelerate.Accelerator, engine_config(tmp_path, dtype="bf16")), mixed_precision="bf16")
    assert epoch(*ours) == pytest.approx(epoch(*prepared(accelerate.Accelerator, mixed_precision="bf16")), rel=0.05)


@pytest.mark.long
def test_two_ranks_train_save_and_load_as_with_ddp(tmp_path):
    lines = []
    for kind, folder in (("Accelerator", tmp_path / "plain"), ("offloaded(Accelerator, engine_config(FOLDER))", tmp_path / "ours")):
        folder.mkdir()
        ((status, output),) = launch(
            folder,
            f"""
            import json
            import torch
            from accelerate import Accelerator
            from test_accelerate import epoch, prepared
            from support.trainers import engine_config
            from infinity.integrations.accelerate import offloaded

            FOLDER = {str(folder)!r}
            torch.set_num_threads(1)
            made = prepared({kind})
            found = epoch(*made)
            made[0].save_state(FOLDER + "/saved")
            found += epoch(*made)
            made[0].load_state(FOLDER + "/saved")
            found += epoch(*made)
            if made[0].is_main_process:
                open(FOLDER + "/found.json", "w").write(json.dumps(found))
            """,
            seconds=300,
        )
        assert status == 0, output[-4000:]
        lines.append(json.loads((folder / "found.json").read_text()))
    assert lines[1] == pytest.approx(lines[0], rel=1e-5)
