"""The scripts of examples/, and the comparison of their losses with those of their plain twins."""

import runpy
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(path.name for path in (FOLDER / "plain").glob("*.py"))


def losses(path, folder, monkeypatch):
    """Losses of a script that runs in `folder`, as from a shell."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(FOLDER)
    return runpy.run_path(str(path), run_name="__main__")["losses"]


def check_losses(name, folder, monkeypatch):
    for package in ("transformers", "accelerate", "trl", "peft", "lightning", "datasets"):
        if package in (FOLDER / name).read_text() or package in ("transformers", "accelerate"):
            pytest.importorskip(package)
    expected = losses(FOLDER / "plain" / name, folder / "plain", monkeypatch)
    found = losses(FOLDER / name, folder / "ours", monkeypatch)
    assert len(found) > 4 and found == pytest.approx(expected, rel=1e-5)
    assert torch.tensor(found).isfinite().all()
