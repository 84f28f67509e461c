"""Muon: the results of torch.optim.Muon, equal bits in every placement, and whole matrices in every shard."""

import json
import time
from types import SimpleNamespace

import pytest
import torch
from support.helpers import NVME, ReferenceAdamW, assert_same_bits, assert_same_states, on_gpu, run_micro_batches, states_of, training
from support.models import gpt_step, tiny_gpt, tokens
from support.muon import DEVICE, HOST, OPTIONS, halves, load_dcp, resumed
from support.ranks import gpt as ranks_gpt
from support.ranks import settings as ranks_settings
from support.ranks import states_of as bytes_of
from support.ranks import tokens as ranks_tokens
from torch import nn
from torch.nn import functional as F

import infinity
from infinity.formats.format import Format
from infinity.optim.adam import split_master
from infinity.optim.muon import NS_COEFFICIENTS, MuonRule, orthogonalized
from infinity.optim.shard import Shard
from infinity.tiers import updates
from infinity.tiers.arithmetic import Computed, Hyper, Run, _units
from infinity.tiers.unit_updates import Unit, UnitUpdates

pytestmark = pytest.mark.usefixtures("one_thread")


def ours(matrix):
    return orthogonalized(matrix, NS_COEFFICIENTS, num_steps=5, eps=1e-7)


class Both:
    """torch.optim.Muon and the stated AdamW, as one optimizer over a plain model."""

    def __init__(self, model, adamw=ReferenceAdamW):
        matrices, others = halves(model)
        self.muon, self.adamw = torch.optim.Muon(matrices, lr=OPTIONS["lr"]), adamw(others, lr=OPTIONS["adamw"]["lr"])

    def step(self):
        self.muon.step()
        self.adamw.step()

    def zero_grad(self):
        self.muon.zero_grad()
        self.adamw.zero_grad()


@pytest.mark.parametrize("shape", [(64, 64), (32, 200), (200, 32), (1, 40)])
def test_the_orthogonalized_matrix_is_that_of_torch(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1e-3
    found = ours(matrix).float()
    theirs = torch.optim._muon._zeropower_via_newtonschulz(matrix, NS_COEFFICIENTS, 5, 1e-7).float()
    assert (found - theirs).abs().max() <= 2**-6 * theirs.abs().max()  # sums in another order, rounded to bf16
    values = torch.linalg.svdvals(found)
    assert values.max() < 1.3 and (shape[0] == shape[1] or values.min() > 0.5)  # a square matrix may have singular values near zero


def test_a_matrix_of_zeros_gives_zeros():
    assert not ours(torch.zeros(8, 16)).any()


def test_muon_has_the_bits_of_torchs_muon_beside_the_same_adamw(tmp_path, monkeypatch):
    """Only the products of matrices are ours: torch computes them in bf16, in an order that depends on the processor."""
    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", lambda matrix, *_: ours(matrix))
    torch.manual_seed(0)
    plain = tiny_gpt()
    reference = Both(plain)
    expected = [gpt_step(plain, reference, step) for step in range(12)]
    with training(tiny_gpt, tmp_path, optimizer=infinity.Muon, options=OPTIONS, **NVME) as (model, engine, optimizer):
        assert [gpt_step(model, optimizer, step) for step in range(12)] == expected
        theirs = dict(plain.named_parameters())
        for name, param in model.named_parameters():
            state = engine.read_state(param)
            assert_same_bits(state["weight"], theirs[name].detach(), name)
            if (of_torch := reference.muon.state.get(theirs[name])) is not None:
                assert state.keys() == {"weight", "momentum"}
                assert_same_bits(state["momentum"], of_torch["momentum_buffer"], name)
            else:
                assert state.keys() == {"weight", "momentum", "variance"}


@pytest.mark.slow
def test_losses_are_those_of_torchs_muon(tmp_path):
    torch.manual_seed(0)
    plain = tiny_gpt()
    reference = Both(plain, torch.optim.AdamW)
    expected = [gpt_step(plain, reference, step) for step in range(15)]
    with training(tiny_gpt, tmp_path, optimizer=infinity.Muon, options=OPTIONS, **NVME) as (model, engine, optimizer):
        assert [gpt_step(model, optimizer, step) for step in range(15)] == pytest.approx(expected, abs=1e-3)


@on_gpu
def test_on_a_gpu_losses_are_those_of_torchs_muon(tmp_path):
    """Beside the stated AdamW: torch's own AdamW kernels differ from each other by more than the tolerance in this training."""
    def make():
        return tiny_gpt().cuda()

    torch.manual_seed(0)
    plain = make()
    reference = Both(plain)
    expected = [cuda_step(plain, reference, step) for step in range(50)]
    for places in (NVME, HOST, DEVICE):
        how = {"optimizer": infinity.Muon, "options": OPTIONS, "device": "cuda"} | places
        with training(make, tmp_path, **how) as (model, engine, optimizer):
            assert [cuda_step(model, optimizer, step) for step in range(50)] == pytest.approx(expected, abs=1e-4), places


def cuda_step(model, optimizer, step):
    loss = model(*(part.cuda() for part in tokens(step)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@on_gpu
def test_units_of_host_memory_get_the_bits_of_units_on_the_device():
    """More units than the device holds at a time, of different sizes."""
    shapes = [(256, 64), (1024, 4096), (64, 64), (4096, 1024), (8, 8)] * 4
    group = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "nesterov": 1.0, "ns_coefficients": NS_COEFFICIENTS, "eps": 1e-7, "ns_steps": 5.0}
    format = Format("bf16", moments=("momentum",), unit="matrix")
    dtypes = {"weight": torch.bfloat16, "residual": torch.int16, "momentum": torch.float32}
    rule, results = MuonRule(), []
    for device in ("cpu", "cuda"):
        generator, units = torch.Generator().manual_seed(0), []
        for rows, columns in shapes:
            weight, residual = split_master(torch.randn(rows * columns, generator=generator))
            segments = {"weight": weight, "residual": residual, "momentum": torch.zeros(rows * columns)}
            gradient = torch.randn(rows * columns, generator=generator).bfloat16()
            place = (lambda tensor: tensor.pin_memory()) if device == "cpu" else torch.Tensor.cuda
            shard = Shard(format, {name: place(segments[name].to(dtype)) for name, dtype in dtypes.items()})
            units.append(Unit(shard, place(gradient), rule, rule.scalars(group, 1), 1.0, None, (rows, columns)))
        on_device = UnitUpdates(torch.device("cuda", 0))
        for _ in range(3):  # the second chunk begins before the first one ends
            both = [on_device.update(units[:9]), on_device.update(units[9:])]
            for chunk in both + both:
                next(chunk, None)
        torch.cuda.synchronize()
        results.append([{name: segment.cpu() for name, segment in unit.shard.items()} for unit in units])
    for number, (on_host, on_device) in enumerate(zip(*results)):
        for name in dtypes:
            assert_same_bits(on_host[name], on_device[name], f"{name} of unit {number}")


def trained(directory, *, steps=4, make=tiny_gpt, options=None, **config):
    """Losses, and the states of all parameters at the end."""
    how = {"optimizer": infinity.Muon, "options": OPTIONS | (options or {})} | config
    with training(make, directory, **how) as (model, engine, optimizer):
        losses = [gpt_step(model, optimizer, step, optimizer.accumulation_steps) for step in range(steps)]
        return losses, states_of(engine, model)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"dtype": "bf16"},
        {"dtype": "bf16", "optimizer_state_dtype": "bf16"},
        {"options": {"max_grad_norm": 0.5}},
        {"options": {"accumulation_steps": 2}, "dtype": "bf16"},
        {"options": {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "lr": 3e-3}},
    ],
    ids=["fp32", "bf16", "bf16-momentum", "clipped", "accumulated", "other-options"],
)
def test_results_have_the_same_bits_in_every_placement(config, tmp_path):
    expected, states = trained(tmp_path, **DEVICE | config)
    for places in (HOST, NVME, NVME | {"chunk_mib": 1 / 8}, {"param_tier": "host", "optimizer_state_tier": "nvme"}):
        losses, found = trained(tmp_path, **places | config)
        assert losses == expected, places
        assert_same_states(found, states, str(places))


class LateUnits(UnitUpdates):
    """On the CPU, units of host memory that get their new values in the second part of an update, as on a GPU."""

    def __init__(self, device):
        super().__init__(device)
        self.num_begun = self.most_begun = 0

    def update(self, units):
        units = list(units)
        copies = [{name: segment.clone() for name, segment in unit.shard.items()} for unit in units]
        for unit, there in zip(units, copies):
            unit.apply(Shard(unit.shard.format, there), unit.gradient.clone())
        self.num_begun += 1
        self.most_begun = max(self.num_begun, self.most_begun)
        yield
        self.num_begun -= 1
        for unit, there in zip(units, copies):
            for name, segment in unit.shard.items():
                segment.copy_(there[name])


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("delay", [0.0, 0.002])
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1}, {"max_grad_norm": 0.1, "accumulation_steps": 2}])
@pytest.mark.parametrize("places", [HOST, NVME])
def test_updates_that_overlap_have_the_same_bits(places, options, delay, tmp_path, monkeypatch):
    """Each chunk's new values come after the next update has begun."""
    expected = trained(tmp_path / "plain", options=options, **DEVICE)
    units = []
    monkeypatch.setattr(updates, "UnitUpdates", lambda device: units.append(LateUnits(device)) or units[-1])
    how = {"optimizer": infinity.Muon, "options": OPTIONS | options} | places
    with training(tiny_gpt, tmp_path / "late", **how) as (model, engine, optimizer):
        engine.updater.lane.on_job = lambda: time.sleep(delay)
        losses = [gpt_step(model, optimizer, step, optimizer.accumulation_steps) for step in range(4)]
        assert losses == expected[0]
        assert_same_states(states_of(engine, model), expected[1])
    assert units[0].num_begun == 0
    if places is HOST and "max_grad_norm" in options:
        assert units[0].most_begun == 2


@pytest.mark.slow
def test_fp16_weights_have_masters_and_a_loss_scale(tmp_path):
    expected, states = trained(tmp_path, dtype="fp16", **DEVICE)
    losses, found = trained(tmp_path, dtype="fp16", **NVME)
    assert losses == expected and losses[-1] < losses[0]
    assert_same_states(found, states)


def test_nvme_holds_eight_bytes_a_parameter_of_a_matrix(tmp_path):
    def make():
        return nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(6)))

    how = {"optimizer": infinity.Muon, "options": OPTIONS, "dtype": "bf16", "chunk_mib": 1 / 16, "checksums": False} | NVME
    with training(make, tmp_path, **how) as (model, engine, optimizer):
        moved = []
        for step in range(4):
            model(torch.randn(4, 128, generator=torch.Generator().manual_seed(step), dtype=torch.bfloat16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.flush()
            stats = engine.stats()
            moved.append((stats["nvme_read_nbytes"], stats["nvme_write_nbytes"]))
        assert sum(chunk.record.nbytes for chunk in engine.registry.chunks) == 8 * 6 * 128 * 128
        read, written = (after - before for before, after in zip(moved[2], moved[3]))
        assert written == 8 * 6 * 128 * 128
        assert read <= (8 + 2) * 6 * 128 * 128  # the weights of an op may be read for the forward pass and for the backward pass


class Experts(nn.Module):
    """Experts as one stack of matrices."""

    def __init__(self, num=6, hidden=32):
        super().__init__()
        self.up = nn.Parameter(torch.randn(num, hidden, hidden) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(num, hidden, hidden) / hidden**0.5)

    def forward(self, x):
        return (x.unsqueeze(0) @ self.up).relu() @ self.down


def test_a_stack_of_matrices_has_the_update_of_each_matrix(tmp_path):
    torch.manual_seed(0)
    plain = Experts()
    rule = MuonRule()
    momenta = {name: torch.zeros_like(param) for name, param in plain.named_parameters()}
    scalars = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "nesterov": 1.0, "ns_coefficients": NS_COEFFICIENTS, "eps": 1e-7, "ns_steps": 5.0}
    how = {"optimizer": infinity.Muon, "options": {"lr": 0.02}} | NVME
    with training(Experts, tmp_path, **how) as (model, engine, optimizer):
        assert [len(group["params"]) for group in optimizer.param_groups] == [2]
        for step in range(3):
            x = torch.randn(5, 32, generator=torch.Generator().manual_seed(step))
            for each in (plain, model):
                each(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for name, param in plain.named_parameters():
                    for index in range(len(param)):
                        rule.update(param[index], param.grad[index], {"momentum": momenta[name][index]}, scalars)
            plain.zero_grad()
        for (name, theirs), mine in zip(plain.named_parameters(), model.parameters()):
            assert_same_bits(engine.read_state(mine)["weight"], theirs.detach(), name)


@pytest.mark.slow
def test_by_layer_equals_the_loop(tmp_path):
    found = []
    for by_layer in (False, True):
        how = {"optimizer": infinity.Muon, "options": OPTIONS | {"accumulation_steps": 3, "max_grad_norm": 1.0}, "dtype": "bf16"} | NVME
        with training(tiny_gpt, tmp_path, **how) as (model, engine, optimizer):
            for step in range(3):
                batches = [tokens(step, micro) for micro in range(3)]
                run_micro_batches(model, batches, lambda logits, y: F.cross_entropy(logits.float().flatten(0, 1), y.flatten()) / 3, by_layer)
                optimizer.step()
                optimizer.zero_grad()
            found.append(states_of(engine, model))
    assert_same_states(found[1], found[0])


# ---- checkpoints ----


def test_a_resumed_training_has_the_bits_of_an_uninterrupted_one(tmp_path):
    with training(tiny_gpt, tmp_path, optimizer=infinity.Muon, options=OPTIONS, **NVME) as (model, engine, optimizer):
        for step in range(2):
            gpt_step(model, optimizer, step)
        infinity.save(tmp_path / "checkpoint", model, optimizer)
        infinity.save_dcp(tmp_path / "dcp", model, optimizer)
        for step in (2, 3):
            gpt_step(model, optimizer, step)
        expected = states_of(engine, model)
    assert json.loads((tmp_path / "checkpoint" / "manifest.json").read_text())["version"] == 3
    for places in (NVME, HOST | {"chunk_mib": 1 / 8}):
        assert_same_states(resumed(tmp_path, tmp_path / "checkpoint", infinity.load, **places), expected)
        assert_same_states(resumed(tmp_path, tmp_path / "dcp", load_dcp, **places), expected)


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
    for saved, loaded in ((infinity.AdamW, infinity.Muon), (infinity.Muon, infinity.AdamW)):
        with training(tiny_gpt, tmp_path, optimizer=saved) as (model, engine, optimizer):
            gpt_step(model, optimizer, 0)
            infinity.save(tmp_path / saved.__name__, model, optimizer)
        with training(tiny_gpt, tmp_path, optimizer=loaded) as (model, engine, optimizer):
            with pytest.raises(infinity.CheckpointError, match="load without the optimizer"):
                infinity.load(tmp_path / saved.__name__, model, optimizer)
            infinity.load(tmp_path / saved.__name__, model)
            gpt_step(model, optimizer, 1)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("make", ["gpt", "uneven"])
def test_two_ranks_save_and_one_rank_resumes(make, worlds, tmp_path):
    expected = worlds(2).run(train_on_ranks, make, tmp_path, tmp_path / "checkpoint")
    assert train_on_ranks(make, tmp_path, tmp_path / "checkpoint", resumes=True) == expected[0] == expected[1]


class Uneven(nn.Module):
    """Two matrices of different sizes: the shard of the smaller one has a long gap."""

    def __init__(self):
        super().__init__()
        self.small, self.large = nn.Linear(64, 64, bias=False), nn.Linear(64, 96, bias=False)

    def forward(self, tokens, _):
        return self.large(self.small(tokens[:, :1].float().expand(-1, 64) / 61)).square().mean()


def train_on_ranks(make, folder, checkpoint, resumes=False):
    """States after four steps of the same data on each rank; a checkpoint after two."""
    torch.manual_seed(0)
    with infinity.init(ranks_settings(folder, **NVME)):
        model = ranks_gpt() if make == "gpt" else Uneven()
    optimizer = infinity.Muon(model.parameters(), **OPTIONS)
    with infinity.engine_of(model) as engine:
        if resumes:
            infinity.load(checkpoint, model, optimizer)
        for step in range(2 if resumes else 0, 4):
            model(*ranks_tokens(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                infinity.save(checkpoint, model, optimizer)
        return bytes_of(engine, model)


# ---- who has Muon ----


def divided(model, directory, groups=None, **options):
    """The names of the parameters that Muon updates, and the optimizer."""
    with infinity.offload(model, infinity.Config(swap_dirs=directory, device="cpu", dtype="fp32", host_memory="64MiB", **options)):
        optimizer = infinity.Muon(groups(model) if groups else model.parameters(), **OPTIONS)
        names = {id(param): name for name, param in model.named_parameters()}
        found = {names[id(param)] for group in optimizer.param_groups if group["muon"] for param in group["params"]}
        return found, optimizer


def test_embeddings_heads_and_vectors_have_adamw(tmp_path):
    found, optimizer = divided(tiny_gpt(), tmp_path)
    assert found == {f"blocks.{i}.{name}.weight" for i in range(2) for name in ("attention.qkv", "attention.projection", "mlp.0", "mlp.2")}
    assert [(group["muon"], group["lr"]) for group in optimizer.param_groups] == [(True, 0.02), (False, 3e-3)]
    assert divided(tiny_gpt(tie=True), tmp_path)[0] == found


def test_convolutions_and_tables_of_positions_have_adamw(tmp_path):
    class Vision(nn.Module):
        def __init__(self):
            super().__init__()
            self.patch, self.positions, self.mix = nn.Conv2d(3, 16, 4), nn.Parameter(torch.zeros(1, 9, 16)), nn.Linear(16, 16)
            self.depthwise = nn.Conv1d(16, 16, 3, groups=16)

        def forward(self, x):
            return self.mix(self.patch(x).flatten(2).transpose(1, 2) + self.positions)

    assert divided(Vision(), tmp_path)[0] == {"mix.weight"}


def test_a_group_may_decide_itself(tmp_path):
    def groups(model):
        return [{"params": [model.first.weight], "muon": False, "lr": 0.5}, {"params": model.last.named_parameters()}]

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(16, 16, bias=False), nn.Linear(16, 16)

        def forward(self, x):
            return self.last(self.first(x))

    found, optimizer = divided(Two(), tmp_path, groups)
    assert found == {"last.weight"}
    assert [(group["muon"], group["lr"]) for group in optimizer.param_groups] == [(False, 0.5), (True, 0.02), (False, 3e-3)]


def test_a_group_for_both_has_no_learning_rate_of_its_own(tmp_path):
    def groups(model):
        return [{"params": list(model.parameters()), "lr": 0.1}]

    with pytest.raises(infinity.ConfigError, match="a parameter group with lr has matrices for Muon and other parameters for AdamW"):
        divided(tiny_gpt(), tmp_path, groups)
    model = tiny_gpt()
    with infinity.offload(model, infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", host_memory="64MiB")):
        optimizer = infinity.Muon([{"params": list(model.parameters()), "lr": 0.1, "weight_decay": 0.0}], adjust_lr_fn="match_rms_adamw")
        assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.1, 0.0), (0.1, 0.0)]


def test_a_parameter_without_an_optimizer_needs_no_whole_matrix(tmp_path):
    def others(model):
        return [param for name, param in model.named_parameters() if name != "token.weight"]

    with training(tiny_gpt, tmp_path, optimizer=infinity.Muon, groups=others) as (model, engine, optimizer):
        gpt_step(model, optimizer, 0)
        (format,) = {chunk.record.format for chunk in engine.registry.chunks_of(engine.registry.find(model.token.weight))}
        assert format.unit == "element"


def test_one_learning_rate_serves_both_if_updates_match_those_of_adamw(tmp_path):
    model = tiny_gpt()
    with infinity.offload(model, infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", host_memory="64MiB")):
        optimizer = infinity.Muon(model.parameters(), lr=7e-4, adjust_lr_fn="match_rms_adamw")
        assert [group["lr"] for group in optimizer.param_groups] == [7e-4, 7e-4]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"adjust_lr_fn": "match"}, "adjust_lr_fn='match': expected one of None, 'original', 'match_rms_adamw'"),
        ({"adamw": {"learning_rate": 1}}, "adamw has learning_rate: expected some of lr, betas, eps, weight_decay"),
        ({"adamw": 1e-3}, "adamw=0.001: expected a dict with some of lr, betas, eps, weight_decay"),
        ({"ns_steps": 0}, "ns_steps=0.0: expected an integer from 1 to 99"),
        ({"ns_coefficients": (1, 2)}, "expected three numbers"),
        ({"momentum": -1}, "momentum=-1.0: expected 0 or more"),
    ],
)
def test_wrong_options_are_refused(options, message, tmp_path):
    model = tiny_gpt()
    with infinity.offload(model, infinity.Config(swap_dirs=tmp_path, device="cpu")), pytest.raises(infinity.ConfigError, match=message):
        infinity.Muon(model.parameters(), **options)


def test_vectors_and_tiles_are_refused(tmp_path):
    def vectors(model):
        return [{"params": [param for param in model.parameters() if param.dim() < 2], "muon": True}]

    with pytest.raises(infinity.ConfigError, match=r"a group with 'muon': True has a parameter of shape \(32,\)"):
        divided(tiny_gpt(), tmp_path, vectors)
    with pytest.raises(infinity.ConfigError, match="lies in tiles, and MuonRule needs the whole matrix. Set tile_above=None in infinity.Config"):
        divided(tiny_gpt(), tmp_path, tile_above=2048)


def test_a_group_keeps_its_rule(tmp_path):
    with training(tiny_gpt, tmp_path, optimizer=infinity.Muon, options=OPTIONS) as (model, engine, optimizer):
        gpt_step(model, optimizer, 0)
        optimizer.param_groups[0]["muon"] = False
        with pytest.raises(infinity.ConfigError, match="'muon': False in a parameter group that began with True"):
            gpt_step(model, optimizer, 1)


def test_units_beyond_2_to_the_32_elements_are_whole():
    """Random bits are drawn for each unit, wherever the unit begins in its parameter."""
    shape, rule = (32, 96), MuonRule()
    numel = 3 * 32 * 96
    format = Format("bf16", moments=rule.moments, moments_dtype="bf16", unit="matrix")
    dtypes = {"weight": torch.bfloat16, "residual": torch.int16, "momentum": torch.bfloat16}
    states = [Shard(format, {name: torch.zeros(numel, dtype=dtype) for name, dtype in dtypes.items()}) for _ in range(2)]
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(0)).bfloat16()
    group = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "nesterov": 1.0, "ns_coefficients": NS_COEFFICIENTS, "eps": 1e-7, "ns_steps": 5.0}
    param = SimpleNamespace(name="w", shape=(1 << 21, *shape))
    begin = ((1 << 32) // (32 * 96) - 1) * 32 * 96  # the second unit has element 2^32
    for state, cuts in zip(states, ([0, numel], [0, 32 * 96, numel])):
        for start, end in zip(cuts, cuts[1:]):
            run = Run(start, end, 0, 1, 0, begin + start)
            computed = Computed([run], Hyper([rule], [group]), [param], 0)
            list(UnitUpdates(torch.device("cpu")).update(_units(run, state, gradient, computed)))
    assert states[0]["momentum"].any()
    for name in dtypes:
        assert_same_bits(states[0][name], states[1][name], name)
