"""The start block and `infinity.describe`: when the block is printed, and numbers that agree with the engine."""

import contextlib
import dataclasses
import io
import logging
import sys

import pytest
import torch
from support.ranks import World
from torch import nn

import infinity
from infinity.model.gpt import GPT
from infinity.plan.traffic import MOST_GROUPS, _groups

ON_NVME = {"param_tier": "nvme", "optimizer_state_tier": "nvme", "residency": "none"}
STEP_LINKS = ("nvme_read", "h2d", "all_gather", "reduce_scatter", "d2h", "nvme_write")


def build(folder, **options):
    """A GPT of 230,000 parameters and its optimizer. options: of Config and of the optimizer."""
    own = {name: options.pop(name) for name in ("max_grad_norm", "accumulation_steps") if name in options}
    torch.manual_seed(0)
    with infinity.init(infinity.Config(swap_dirs=folder, device="cpu", chunk_mib=1 / 16, **options)):
        model = GPT(hidden=64, layers=4, heads=4, vocab=256, seq=16)
    return model, infinity.AdamW(model.parameters(), **own)


def moved(model, optimizer, num_steps):
    """Mean bytes per step of each link, over the last num_steps steps."""
    found, tokens = [], torch.randint(256, (2, 16))
    for _ in range(num_steps + 3):
        for _ in range(optimizer.accumulation_steps):
            model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append({link: totals["nbytes"] for link, totals in infinity.engine_of(model).stats()["links"].items()})
    return {link: (found[-1][link] - found[2][link]) / num_steps for link in STEP_LINKS}


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options",
    [
        ON_NVME | {"compression": "off", "host_memory": "1MiB", "device_memory": "512KiB"},
        ON_NVME | {"dtype": "fp32", "max_grad_norm": 1.0, "host_memory": "2MiB", "device_memory": "1MiB"},
        {"host_memory": "3MiB", "device_memory": "512KiB", "accumulation_steps": 3, "max_grad_norm": 1.0},
        {"param_tier": "host", "optimizer_state_tier": "host", "device_memory": "512KiB"},
        {"param_tier": "device", "optimizer_state_tier": "host", "device_memory": "2MiB"},
        {"device_memory": "64MiB"},
    ],
    ids=["nvme", "nvme fp32", "passes", "host", "weights on the device", "device"],
)
def test_described_bytes_per_step_are_near_the_measured_bytes(options, tmp_path):
    model, optimizer = build(tmp_path, **options)
    with infinity.engine_of(model):
        expected = infinity.describe(model).step_nbytes
        found = moved(model, optimizer, 16)
    for link in ("h2d", "d2h"):
        assert expected[link] == pytest.approx(found[link], rel=0.06)
    for link in ("nvme_read", "nvme_write"):
        assert expected[link] == pytest.approx(found[link], rel=0.25)
    assert expected["all_gather"] == expected["reduce_scatter"] == 0


@pytest.mark.long
def test_described_bytes_of_two_ranks_are_near_the_measured_bytes(tmp_path):
    world = World(2, tmp_path)
    results = world.run(_of_two_ranks, tmp_path)
    world.close()
    for description, found in results:
        assert description.num_ranks == 2 and "2 ranks, bytes are per rank" in str(description)
        for link in ("all_gather", "reduce_scatter", "h2d", "d2h"):
            assert description.step_nbytes[link] == pytest.approx(found[link], rel=0.06), link


def _of_two_ranks(folder):
    model, optimizer = build(folder, param_tier="host", optimizer_state_tier="host", device_memory="1MiB")
    with infinity.engine_of(model):
        return infinity.describe(model), moved(model, optimizer, 16)


def test_described_tiers_agree_with_the_placement_and_the_budgets(tmp_path):
    model, _ = build(tmp_path, host_memory="2MiB", device_memory="512KiB", compression="off")
    with infinity.engine_of(model) as engine:
        found, stats = infinity.describe(model), engine.stats()
        assert sum(tier.weights + tier.states for tier in found.tiers.values()) == stats["model_state_nbytes"]
        assert found.tiers["host"].used + found.tiers["host"].left == 2 << 20
        assert found.tiers["device"].used + found.tiers["device"].left == 512 << 10
        assert found.tiers["nvme"].used == engine.placement.nvme_nbytes > 0 and found.tiers["nvme"].left > 0
        assert found.stored == {"weight": "bf16", "residual": "int16", "momentum": "fp32", "variance": "fp32"}
        assert found.num_parameters == found.num_trainable == stats["num_parameters"]
        with pytest.raises(dataclasses.FrozenInstanceError):
            found.dtype = "fp32"


def test_seconds_and_bottleneck_follow_from_measured_drives(tmp_path, monkeypatch):
    model, _ = build(tmp_path, param_tier="nvme", optimizer_state_tier="nvme", residency="none", compression="off")
    with infinity.engine_of(model) as engine:
        found = infinity.describe(model)
        assert found.drive_seconds is None and "drives are not measured" in str(found)
        monkeypatch.setattr(type(engine.swap), "nbytes_per_s", 1e6)
        found = infinity.describe(model)
        assert found.drive_seconds == (found.step_nbytes["nvme_read"] + found.step_nbytes["nvme_write"]) / 1e6
        assert found.bottleneck == "nvme_read" and "bottleneck: nvme_read; about" in str(found)


def test_the_start_block_has_at_most_12_lines_of_100_columns(tmp_path):
    model, _ = build(tmp_path, host_memory="3MiB", device_memory="512KiB", tile_above="16KiB", max_grad_norm=1.0)
    with infinity.engine_of(model):
        found = infinity.describe(model)
        assert found.tiled
        large = dict.fromkeys(("weights", "states", "gradients", "used"), 1000 << 40)
        tier = dataclasses.replace(found.tiers["host"], **large)
        wide = {"step_nbytes": dict.fromkeys(STEP_LINKS, 1000 << 40), "tiers": dict.fromkeys(found.tiers, tier), "num_ranks": 512}
        for description in (found, dataclasses.replace(found, num_parameters=10**12, drive_seconds=1234.5, **wide)):
            lines = str(description).splitlines()
            assert len(lines) <= 12 and max(map(len, lines)) <= 100


def test_tiled_layers_are_named_with_the_option_that_prevents_tiles(tmp_path):
    for above, expected in ("16KiB", True), (None, False):
        model, _ = build(tmp_path, device_memory="512KiB", tile_above=above)
        with infinity.engine_of(model):
            found = infinity.describe(model)
            assert bool(found.tiled) is expected is ("cut into" in str(found)) is ("tile_above=None" in str(found))
            for name, num in found.tiled.items():
                assert len(model.get_submodule(name).tiles) == num > 1


def test_the_logger_infinity_start_gets_the_block_once(tmp_path, caplog):
    model, _ = build(tmp_path)
    with infinity.engine_of(model):
        model(torch.zeros(1, 16, dtype=torch.int64), torch.zeros(1, 16, dtype=torch.int64)).backward()
        (record,) = [record for record in caplog.records if record.name == "infinity.start"]
        assert record.levelno == logging.INFO and record.getMessage() == str(infinity.describe(model))


def test_verbose_false_prints_no_start_block(tmp_path, caplog):
    model, _ = build(tmp_path, verbose=False)
    with infinity.engine_of(model):
        assert not caplog.records and infinity.describe(model).model == "GPT"


def test_the_block_goes_to_stderr_only_if_no_handler_gets_the_record(tmp_path, capsys, caplog, monkeypatch):
    logger = logging.getLogger("infinity.start")
    monkeypatch.setattr(logger, "propagate", False)  # the state of a program that has not configured logging
    for number, expected in enumerate(("infinity: Linear, 72 parameters (all trainable), on cpu", "", "")):
        if number == 1:
            logger.addHandler(caplog.handler)
        elif number == 2:
            logger.removeHandler(caplog.handler)
            monkeypatch.setattr(logger, "level", logging.WARNING)
            logger.manager._clear_cache()
        model = nn.Linear(8, 8)
        with infinity.offload(model, infinity.Config(swap_dirs=tmp_path, device="cpu")):
            infinity.AdamW(model.parameters())
            assert capsys.readouterr().err.partition("\n")[0] == expected
            assert len(caplog.records) == (number >= 1)


def test_a_stderr_that_cannot_be_written_does_not_end_the_program(tmp_path, monkeypatch):
    monkeypatch.setattr(logging.getLogger("infinity.start"), "propagate", False)
    closed = io.StringIO()
    closed.close()
    with open("/dev/full", "w", buffering=1) as full:
        for stderr in None, closed, full:
            monkeypatch.setattr(sys, "stderr", stderr)
            model = nn.Linear(8, 8)
            with infinity.offload(model, infinity.Config(swap_dirs=tmp_path, device="cpu")):
                infinity.AdamW(model.parameters())
                assert infinity.describe(model).num_parameters == 72
        with contextlib.suppress(OSError):
            full.close()


def test_a_model_whose_engine_has_not_started_or_is_closed_is_refused(tmp_path):
    model = nn.Linear(8, 8)
    with pytest.raises(infinity.ConfigError, match="is in no engine"):
        infinity.describe(model)
    engine = infinity.offload(model, infinity.Config(swap_dirs=tmp_path, device="cpu"))
    with pytest.raises(infinity.UsageError, match="Create the optimizer first"):
        infinity.describe(model)
    infinity.AdamW(model.parameters())
    engine.close()
    with pytest.raises(infinity.UsageError, match="closed"):
        infinity.describe(model)


def test_the_bytes_of_a_large_model_are_counted_in_few_groups():
    for num in (1, MOST_GROUPS, MOST_GROUPS + 1, 10_000):
        groups = _groups(range(num))
        assert len(groups) <= MOST_GROUPS and [span for group in groups for span in group] == list(range(num))
