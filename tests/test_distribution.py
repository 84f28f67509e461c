"""Distributions: the source distribution equals the checkout, the wheel works outside a checkout, and `make` installs the right PyTorch."""

import contextlib
import email
import functools
import http.server
import os
import subprocess
import sys
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest

import infinity
from infinity.errors import UsageError
from infinity.output import pyplot

ROOT = Path(__file__).parent.parent
NOT_GIVEN_OUT = {".gitignore"}


def run(*command, cwd, statuses=(0,), **environment):
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode in statuses, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def checked_out():
    """Files of the checkout under version control. Skips in an unpacked source distribution."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a checkout with .git")
    listed = run("git", "ls-files", "-z", cwd=ROOT).split("\0")
    return {name for name in listed if name and (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The unpacked source distribution, built from a copy of the checkout."""
    folder = tmp_path_factory.mktemp("distribution")
    for name in checked_out():
        target = folder / "checkout" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", folder, cwd=folder / "checkout")
    (archive,) = folder.glob("*.tar.gz")
    assert archive.name == f"infinity_offload-{infinity.__version__}.tar.gz"
    with tarfile.open(archive) as file:
        file.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # since Python 3.11.4
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(sources):
    """The wheel, built from the source distribution alone, without a network."""
    run(sys.executable, "setup.py", "--quiet", "bdist_wheel", "--dist-dir", sources.parent / "wheel", cwd=sources, INFINITY_WERROR="1")
    (path,) = (sources.parent / "wheel").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel):
    """A folder for PYTHONPATH, with commands in the subfolder bin."""
    site = wheel.parent.parent / "site"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", site, wheel, cwd=wheel.parent)
    return site


@pytest.mark.slow
def test_the_sources_are_the_whole_checkout(sources):
    found = {str(path.relative_to(sources)) for path in sources.rglob("*") if path.is_file()}
    assert checked_out() - found == NOT_GIVEN_OUT
    made = {name for name in found - checked_out() if not name.startswith("infinity_offload.egg-info/")}
    assert made == {"PKG-INFO", "setup.cfg"}


@pytest.mark.long
def test_the_wheel_fits_every_python_and_has_its_metadata(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
        (metadata,) = (name for name in file.namelist() if name.endswith("/METADATA"))
        said = email.message_from_string(file.read(metadata).decode())
    if not hasattr(sys, "_is_gil_enabled") or sys._is_gil_enabled():
        assert wheel.name.startswith(f"infinity_offload-{infinity.__version__}-cp311-abi3-linux_")
        assert {"aio_ext/_aio.abi3.so", "infinity/optim/_adam.abi3.so"} <= names
    assert {name.split("/")[0] for name in names} == {"infinity", "infinity_offload", "aio_ext"}
    assert {Path(name).suffix for name in names} == {".py", ".so", ".typed", ".toml"}
    assert (said["Name"], said["Version"], said["Author"]) == ("infinity-offload", infinity.__version__, "The infinity authors")
    assert said["License-Expression"] == "MIT" and said["Summary"] and said["Requires-Python"] == ">=3.11"
    assert set(said.get_all("Provides-Extra")) == {"docs", "hf", "lightning", "plot", "progress", "test"}


@pytest.mark.long
def test_the_wheel_works_outside_of_a_checkout(installed, tmp_path):
    def command(*words, statuses=(0,)):
        return run(*words, cwd=tmp_path, statuses=statuses, PYTHONPATH=str(installed), OMP_NUM_THREADS="1")

    program = installed / "bin" / "infinity"
    source = "import infinity, aio_ext; from infinity.tools.machine import Machine; print(infinity.__file__, aio_ext.__file__)"
    where = command(sys.executable, "-c", source + "; print(Machine.load('h200x8').name)")
    assert where == f"{installed}/infinity/__init__.py {installed}/aio_ext/__init__.py\n8 x H200, 8 x NVMe\n"
    assert command(program, "--version").startswith(f"infinity {infinity.__version__}, PyTorch ")
    small = "--hidden 64 --layers 2 --heads 4 --seq 32 --batch 4 --steps 3 --device cpu --dtype fp32".split()
    assert "loss " in command(program, "train", *small, "--param-tier", "nvme", "--optimizer-state-tier", "nvme")
    report = command(program, "doctor", "--seconds", "0", statuses=(0, 1))  # status 1: a finding about this machine needs attention
    assert "[ok] libaio" in report and "the check failed" not in report


SAME = """
import infinity_offload
import infinity
import infinity_offload.config as config
from infinity_offload import AdamW
from infinity_offload.engine.engine import Engine
import infinity.config
assert infinity_offload is infinity and config is infinity.config and (AdamW, Engine) == (infinity.AdamW, infinity.Engine)
assert (config.__name__, config.__spec__.name) == ("infinity.config", "infinity.config")
try:
    import infinity_offload.nothing
except ModuleNotFoundError as error:
    assert error.name == "infinity.nothing"
"""


@pytest.mark.long
@pytest.mark.parametrize("where", ["installed", "checkout"])
def test_both_import_names_are_one_module(where, request, tmp_path):
    site = [request.getfixturevalue("installed")] if where == "installed" else [ROOT, ROOT / "infinity/alias"]
    path = os.pathsep.join(map(str, site))
    run(sys.executable, "-c", SAME, cwd=tmp_path, PYTHONPATH=path)
    said = run(sys.executable, "-m", "infinity_offload", "--version", cwd=tmp_path, PYTHONPATH=path)
    assert said.startswith(f"infinity {infinity.__version__}, PyTorch ")


def test_the_advice_to_install_an_extra_names_this_distribution(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"pip install matplotlib \(the extra infinity-offload\[plot\]\)"):
        pyplot()


@pytest.fixture
def served():
    """Returns a function that serves a folder over HTTP on this machine and returns the port."""
    with contextlib.ExitStack() as stack:

        def serve(folder):
            handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
            server = stack.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
            return server.server_port

        yield serve


@pytest.mark.slow
@pytest.mark.parametrize(
    "nvidia, answers, said, index",
    [
        ("true", False, "PyTorch with CUDA, unless it is there: some 2.8 GB", ""),
        ("false", True, "PyTorch for processors alone", "--index-url INDEX "),
        ("false", False, "does not answer: PyTorch of pip's own index, up to 2.8 GB", ""),
    ],
)
def test_make_installs_the_pytorch_for_this_machine(tmp_path, served, nvidia, answers, said, index):
    """A script that logs its arguments replaces the interpreter of the virtual environment."""
    (tmp_path / "index" / "torch").mkdir(parents=True)
    url = f"http://127.0.0.1:{served(tmp_path / 'index')}/{'' if answers else 'elsewhere'}"
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nif [ "$1" = -c ]; then exec {sys.executable} "$@"; fi\necho "$@" >> {tmp_path}/told\n')
    python.chmod(0o755)
    variables = [f"VENV={tmp_path}/venv", f"HAS_NVIDIA={nvidia}", f"CPU_INDEX={url}", "TORCH=torch==2.13.0"]
    out = run("make", "--no-print-directory", *variables, tmp_path / "venv" / ".packages", cwd=ROOT, no_proxy="*")
    assert said in out
    told = (tmp_path / "told").read_text().splitlines()
    assert told[1] == f"-m pip --disable-pip-version-check install {index.replace('INDEX', url)}torch==2.13.0"
