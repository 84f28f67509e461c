"""Scripts of examples/ on one device, and on two devices with NCCL, compared with their plain twins."""

import json

import pytest
import torch
from support.examples import FOLDER, SCRIPTS, check_losses
from support.helpers import on_gpu
from support.ranks import launch

ON_RANKS = ("accelerate_loop.py", "sft_lora.py", "trainer.py")  # scripts without a number of devices


@on_gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SCRIPTS)
def test_losses_on_a_device_equal_those_of_the_twin(name, tmp_path, monkeypatch):
    check_losses(name, tmp_path, monkeypatch)


def losses_on_two_ranks(path, folder):
    """Losses of a script on two ranks with one device each."""
    folder.mkdir()
    source = f"""
        import json, os, pathlib, runpy, sys
        import torch

        rank = os.environ["LOCAL_RANK"]
        torch.cuda.set_device(int(rank))
        os.chdir({str(folder)!r})
        sys.path.insert(0, {str(FOLDER)!r})
        found = runpy.run_path({str(path)!r}, run_name="__main__")["losses"]
        pathlib.Path(f"losses-{{rank}}.json").write_text(json.dumps([found, torch.distributed.get_backend()]))
        """
    ((status, output),) = launch(folder, source, seconds=300)
    assert status == 0, output[-4000:]
    found, backends = zip(*(json.loads((folder / f"losses-{rank}.json").read_text()) for rank in range(2)), strict=True)
    assert all("nccl" in backend for backend in backends), backends
    return found


@on_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("name", ON_RANKS)
def test_losses_on_two_devices_equal_those_of_the_twin(name, tmp_path):
    for package in ("transformers", "accelerate") + ("trl", "peft", "datasets") * (name == "sft_lora.py"):
        pytest.importorskip(package)
    expected = losses_on_two_ranks(FOLDER / "plain" / name, tmp_path / "plain")
    found = losses_on_two_ranks(FOLDER / name, tmp_path / "ours")
    assert len(found[0]) > 3 and list(found) == [pytest.approx(each, rel=1e-5) for each in expected]
