"""A type checker finds a program's mistakes in the use of the package, and none in the examples."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

MISTAKES = """
import infinity, torch
params = torch.nn.Linear(2, 2).parameters()
infinity.Config(dtype="bfloat16")  # arg-type
infinity.Config(param_teir="host")  # call-arg
infinity.AdamW(params, lr="3")  # arg-type
infinity.AdamW(params, weight_decy=0.1)  # call-arg
infinity.SGD(params, accumulation_steps=1.5)  # arg-type
infinity.Lion(params, betas=0.9)  # arg-type
engine = infinity.offload(torch.nn.Linear(2, 2), infinity.Config(dtype="bf16", param_tier="host", swap_dirs=["a", "b"]))
engine.stats()["num_parametrs"]  # typeddict-item
engine.stats()["links"]["h2d"]["nbytes"] + 1
engine.closed  # attr-defined
infinity.no_such_name  # attr-defined
optimizer = infinity.AdamW([{"params": params, "lr": 0.1}], 1e-3, (0.9, 0.95), max_grad_norm=1.0, loss_scale=infinity.LossScale())
with infinity.init(), infinity.gathered(params), infinity.no_sync(torch.nn.Linear(2, 2)):
    infinity.save("path", torch.nn.Linear(2, 2), optimizer, extra={"step": 1}).wait()
"""


@pytest.fixture(scope="module")
def check(tmp_path_factory):
    """Returns a function that runs mypy with the settings of the checkout and returns the output."""
    pytest.importorskip("mypy")
    cache = tmp_path_factory.mktemp("cache")

    def run(*arguments):
        command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", cache, *arguments]
        return subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=600).stdout

    return run


def test_the_examples_have_no_type_errors(check):
    for package in ("torch", "transformers", "lightning"):
        pytest.importorskip(package)
    assert check().startswith("Success: no issues found")


def test_mistakes_in_names_and_types_are_found(check, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(MISTAKES)
    expected = [(number, line.split("# ")[1]) for number, line in enumerate(MISTAKES.splitlines(), 1) if "# " in line]
    output = check(program)
    assert [(int(line), code) for line, code in re.findall(r"program\.py:(\d+): error: .*\[([\w-]+)\]$", output, re.MULTILINE)] == expected, output


def test_the_package_has_a_py_typed_file():
    assert (ROOT / "infinity/py.typed").is_file()
