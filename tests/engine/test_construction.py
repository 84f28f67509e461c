"""infinity.init: the weights of a plain construction, bit for bit, with at most a window of them in memory.

Long because each way to set values is tried with parameters that are drawn later, away, and in memory.
"""

import contextlib
import copy
import dataclasses
import errno
import gc
import os
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from support.helpers import assert_same_bits, everything_in, on_gpu
from support.models import TRAITS, H, mlp, tiny_gpt
from support.ranks import World
from torch import nn

import infinity
from infinity.engine.refused_wrappers import watch_replicas
from infinity.engine.sizing import budgets, host_share
from infinity.errors import UsageError
from infinity.formats.dtypes import TORCH_DTYPES
from infinity.model import deferred_init as draws
from infinity.plan.record import STATES, WEIGHTS
from infinity.system.ranks import Ranks
from infinity.system.scratch import Scratch

construction = sys.modules["infinity.engine.construction"]


@pytest.fixture
def config(tmp_path):
    return infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", chunk_mib=1 / 512, host_memory="64MiB")


def applied():
    """A parent that initialises child modules again, with constant and with random values."""

    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(H, H) for _ in range(6)))
            self.apply(self.again)
            for p in self.parameters():
                if p.ndim > 1:
                    nn.init.xavier_uniform_(p)
            with torch.no_grad():
                self.layers[2].weight[:, 3] = self.layers[0].weight[3] * 2
                self.layers[1].weight.data.mul_(0.5)

        @staticmethod
        def again(module):
            if isinstance(module, nn.Linear):
                module.weight.data.normal_(0, 0.02)
                nn.init.constant_(module.bias, 0.25)

    return Parent()


def tied_and_copied():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Embedding(40, H)
            layer = nn.TransformerEncoderLayer(H, 4, 2 * H, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
            self.scale = nn.Parameter(torch.randn(H))
            self.head = nn.Linear(H, 40, bias=False)
            self.head.weight = self.token.weight
            self.twin = copy.deepcopy(self.head)
            self.again = nn.Parameter(self.scale)
            self.again.data = self.again.data.clone()  # without this, both parameters would share memory, which an engine cannot keep

    return Both()


BUILDS = {
    "gpt": tiny_gpt,
    "tied gpt": lambda: tiny_gpt(tie=True),
    "applied": applied,
    "tied and copied": tied_and_copied,
    **{name: TRAITS[name] for name in ("lstm", "weight_norm", "old_weight_norm", "spectral_norm", "parameter_list", "scalars")},
    **{name: TRAITS[name] for name in ("root_parameters", "attention", "large_layers", "convolution")},
}


@pytest.mark.slow
@pytest.mark.few(14)
@pytest.mark.parametrize("later", [0, 1 << 20])
@pytest.mark.parametrize("window", [0, 5000, 1 << 30])
@pytest.mark.parametrize("build", BUILDS)
def test_the_weights_are_those_of_a_plain_construction(build, window, later, config, monkeypatch):
    """later: parameters of at least so many bytes are drawn when the engine needs them."""
    monkeypatch.setattr(construction, "LATER_FROM_NBYTES", later)
    torch.manual_seed(0)
    expected = BUILDS[build]()
    drawn = torch.rand(4)
    torch.manual_seed(0)
    with infinity.init(config, window=window):
        model = BUILDS[build]()
        assert torch.equal(torch.rand(4), drawn)
    with infinity.engine_of(model) as engine:
        theirs = dict(expected.named_parameters())
        assert [name for name, _ in model.named_parameters()] == list(theirs)
        for name, param in model.named_parameters():
            assert param.shape == theirs[name].shape
            if param.numel():
                assert_same_bits(engine.read_state(param)["weight"], theirs[name].detach(), name)
        for (name, buffer), other in zip(model.named_buffers(), expected.buffers(), strict=True):
            assert torch.equal(buffer, other), name


@pytest.mark.parametrize("window", [0, 4 * H * H, 20 * H * H])
def test_at_most_a_window_of_parameters_is_in_memory(window, config, monkeypatch):
    """After each registration, the window and the newest parameter are in memory."""
    held = []
    builder = construction.ConstructionMode
    original = builder._parameter_registered

    def noting(self, module, name, param):
        original(self, module, name, param)
        held.append(sum(p.untyped_storage().nbytes() for p, *_ in self._present.values()))

    monkeypatch.setattr(builder, "_parameter_registered", noting)
    torch.manual_seed(0)
    with infinity.init(config, window=window):
        model = mlp(12)
    assert len(held) >= 24
    assert max(held) <= window + 4 * H * H
    assert sum(p.untyped_storage().nbytes() for p in model.parameters()) <= window + 4 * H * H + 24 * 4
    infinity.engine_of(model).close()


def test_the_scratch_file_holds_only_parameters_that_are_away(config, monkeypatch):
    """All layers come back one after the other, in two orders."""
    builder = construction.ConstructionMode
    original, files, layer = builder.__exit__, [], 4 * (H * H + H)

    def noting(self, *exception):
        files.append(os.fstat(self.scratch.file.fileno()).st_size)
        original(self, *exception)

    monkeypatch.setattr(builder, "__exit__", noting)
    with infinity.init(config, window=8 * layer):
        model = nn.Sequential(*(nn.Linear(H, H) for _ in range(12)))
        for linear in (*model, *reversed(model)):
            nn.init.ones_(linear.weight)
            nn.init.zeros_(linear.bias)
    assert files == [pytest.approx(4 * layer, abs=2 * layer)]
    with infinity.engine_of(model) as engine:
        for linear in model:
            assert engine.read_state(linear.weight)["weight"].eq(1).all() and engine.read_state(linear.bias)["weight"].eq(0).all()


@pytest.mark.parametrize("limit, expected", [("auto", 32 << 30), ("20GiB", 8 << 30), ("200GiB", 32 << 30), ("1GiB", 1 << 30)])
def test_a_window_is_a_share_of_the_device_memory_that_is_given(limit, expected, tmp_path, monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(construction, "gauge_of", lambda device: SimpleNamespace(free_nbytes=lambda: 80 << 30))
    config = infinity.Config(swap_dirs=tmp_path, device="cpu", device_memory=limit)
    ranks = SimpleNamespace(num_local=1, least=lambda values: values)
    assert construction._windows(config, device, ranks)["cuda"] == expected


@on_gpu
def test_host_and_device_memory_have_separate_windows(tmp_path, monkeypatch):
    """Layers are made on the CPU and on the device in turn."""
    window, held = 4 * 4 * H * H, {"cpu": [], "cuda": []}
    builder = construction.ConstructionMode
    original = builder._parameter_registered

    def noting(self, module, name, param):
        original(self, module, name, param)
        for kind, found in held.items():
            found.append(sum(p.untyped_storage().nbytes() for p, *_ in self._present.values() if p.device.type == kind))

    def build():
        return nn.Sequential(*(nn.Linear(H, H, device=("cpu", "cuda")[index % 2]) for index in range(20)))

    monkeypatch.setattr(builder, "_parameter_registered", noting)
    torch.manual_seed(0)
    expected = build()
    torch.manual_seed(0)
    with infinity.init(infinity.Config(swap_dirs=tmp_path, device="cuda", dtype="fp32", host_memory="64MiB"), window=window):
        model = build()
    for kind, found in held.items():
        assert window - 4 * H * H < max(found) <= window + 4 * H * H, kind
    with infinity.engine_of(model) as engine:
        for param, other in zip(model.parameters(), expected.parameters(), strict=True):
            assert_same_bits(engine.read_state(param)["weight"], other.detach().cpu(), other.shape)


def test_memory_of_parameters_at_the_start_counts_as_free(monkeypatch, tmp_path):
    model, device = mlp(12), torch.device("cpu")
    twice = nn.Parameter(model.layers[0].weight.detach().view(-1))  # shares the memory of layer 0
    part = nn.Parameter(torch.zeros(1 << 20)[:1000])  # the rest of the storage belongs to other code
    taken = sum(param.numel() * 4 for param in model.parameters()) + 4000
    for free in (1 << 40, taken // 2):
        monkeypatch.setattr("infinity.engine.sizing.host_free_nbytes", lambda: free)
        found = budgets(infinity.Config(swap_dirs=tmp_path, device="cpu"), device, Ranks(device), [*model.parameters(), twice, part])
        assert sum(found) == min((free + taken) * 3 // 4, int(0.95 * free))
        assert found == pytest.approx((sum(found) / 3, sum(found) * 2 / 3), abs=1)
    away = [torch.full((), float("nan")).expand(param.shape) for param in model.parameters()]
    assert sum(budgets(infinity.Config(swap_dirs=tmp_path, device="cpu"), device, Ranks(device), away)) == free * 3 // 4


def grown():
    """Parameters that are larger when they leave a second time."""
    model = nn.Sequential(*(nn.Linear(H, H, bias=False, dtype=torch.bfloat16) for _ in range(6)))
    return nn.Sequential(model.float(), nn.Linear(H, H))


def swollen():
    model = nn.Sequential(*(nn.Linear(H, H, bias=False) for _ in range(5)))
    for layer in list(model)[::2]:
        layer.weight.data = torch.cat([layer.weight.data, torch.rand(H, H)])
    return nn.Sequential(model, nn.Linear(H, H))


def mixed():
    """Operations on several parameters, of which some are away."""
    model = nn.Sequential(*(nn.Linear(H, H, bias=False) for _ in range(5)))
    with torch.no_grad():
        model[0].weight.mul_(model[0].weight)
        torch.add(model[1].weight, 1.0, out=model[1].weight)
        model[3].weight.copy_(torch.stack([model[0].weight, model[0].weight]).sum(0))
        model[1].weight.set_(torch.full((H, H), 7.0))
        model[2].weight.set_(torch.full((H, H), 5.0)).add_(1.0)
        model[4].weight.copy_(model[3].weight @ model[0].weight)
        model[2].weight.copy_(model[1].weight)
        torch._foreach_add_([layer.weight for layer in model], [model[0].weight.clone()] * 5)
    return model


@pytest.mark.slow
@pytest.mark.few(6)
@pytest.mark.parametrize("window", [0, 1500, 3000, 6000, 9000])
@pytest.mark.parametrize("build", [grown, swollen, mixed])
def test_resized_and_mixed_parameters_are_as_in_a_plain_construction(build, window, config):
    torch.manual_seed(0)
    expected = build()
    torch.manual_seed(0)
    with infinity.init(config, window=window):
        model = build()
    with infinity.engine_of(model) as engine:
        for (name, param), other in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert param.shape == other.shape
            assert_same_bits(engine.read_state(param)["weight"], other.detach(), name)


@pytest.mark.slow
def test_a_model_built_inside_trains_as_one_built_outside(config, tmp_path):
    def losses(model, optimizer):
        found = []
        for step in range(4):
            x = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(step))
            loss = model(x, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    torch.manual_seed(0)
    with infinity.init(config, window=0):
        inside = tiny_gpt()
    with infinity.engine_of(inside):
        got = losses(inside, infinity.AdamW(inside.parameters(), lr=1e-2))
    torch.manual_seed(0)
    outside = tiny_gpt()
    with infinity.offload(outside, config):
        assert got == losses(outside, infinity.AdamW(outside.parameters(), lr=1e-2))


def test_an_engine_lives_as_long_as_its_model(config):
    for changes in ({}, {"param_tier": "host", "optimizer_state_tier": "host"}):
        with infinity.init(dataclasses.replace(config, **changes)):
            model = mlp(2)
        first = model(torch.ones(1, H))
        gc.collect()
        assert torch.equal(model(torch.ones(1, H)), first)
        assert model.state_dict()["layers.1.weight"].isfinite().all()
        infinity.engine_of(model).close()


def test_a_change_after_the_block_is_refused(config):
    with infinity.init(config, window=0):
        model = mlp()
    nn.init.ones_(model.layers[0].weight)
    with pytest.raises(UsageError, match="was changed after"):
        infinity.AdamW(model.parameters())


def test_an_exception_inside_the_block_removes_the_hooks(config):
    watch_replicas()  # this hook stays once any engine was made
    before = [*nn.modules.module._global_module_registration_hooks.values()]
    with pytest.raises(KeyError), infinity.init(config, window=0):
        mlp()
        raise KeyError
    assert not nn.modules.module._global_parameter_registration_hooks
    assert [*nn.modules.module._global_module_registration_hooks.values()] == before
    plain = nn.Linear(H, H)
    assert not plain.weight.isnan().any()


def test_every_outermost_module_gets_its_own_engine(config, tmp_path):
    with infinity.init(config, window=0):
        first, second = mlp(2), mlp(3)
    assert infinity.engine_of(first) is not infinity.engine_of(second)
    with pytest.raises(infinity.ConfigError, match="is in no engine"):
        infinity.engine_of(first.layers[0])


@pytest.mark.slow
@pytest.mark.parametrize("most", [8, 1000, 4096])
def test_the_scratch_file_is_read_and_written_in_several_calls(most, config, monkeypatch):
    """The kernel moves less than 2 GiB per call."""
    monkeypatch.setattr("infinity.system.scratch._MOST_A_CALL", most)
    test_the_weights_are_those_of_a_plain_construction("lstm", 0, 1 << 20, config, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["a bit", "zeros", "an end"])
@pytest.mark.parametrize("when", ["inside", "at the start"])
def test_a_changed_scratch_file_is_reported_with_its_directory(when, harm, config, monkeypatch):
    """The error comes before a value is used, when the parameter comes back inside the block or for the engine."""
    opened, made = Scratch._opened, []

    def noting(self):
        made.append(opened(self))
        return made[-1]

    def damage():
        fd = made[0].fileno()
        nbytes = os.fstat(fd).st_size
        if harm == "an end":
            os.ftruncate(fd, 0)
            return
        byte = os.pread(fd, 1, nbytes // 2)[0]
        os.pwrite(fd, bytes([byte ^ 16]) if harm == "a bit" else bytes(nbytes), 0 if harm == "zeros" else nbytes // 2)

    monkeypatch.setattr(Scratch, "_opened", noting)
    monkeypatch.setattr(construction, "LATER_FROM_NBYTES", 1 << 20)  # smaller parameters would be drawn later, and need no file
    torch.manual_seed(0)
    with pytest.raises(infinity.SwapError, match=r"of shape \(64, 64\) under construction: .*name another directory") as caught:
        with infinity.init(config, window=0):
            model = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))
            damage()
            if when == "inside":
                for layer in model:
                    layer.weight.data.zero_()
        for param in model.parameters():
            infinity.engine_of(model).read_state(param)
    assert caught.value.errno == errno.EIO and caught.value.filename == str(config.swap_dirs[0])


class Counts:
    """The bytes that the last `infinity.init` wrote and read, and the parameters that came back."""

    def __init__(self, builders):
        self.builders = builders

    def read(self):
        (builder,) = self.builders
        self.builders.clear()
        return {"written": builder.scratch.written_nbytes, "read": builder.scratch.read_nbytes, "homecomings": builder.num_homecomings}


@pytest.fixture
def counts(monkeypatch):
    """All values are drawn later, in stripes."""
    monkeypatch.setattr(construction, "LATER_FROM_NBYTES", 0)
    monkeypatch.setattr(draws, "STRIPE_NUMEL", 1 << 8)
    builders, original = [], construction.ConstructionMode.__init__

    def noting(self, *args):
        builders.append(self)
        original(self, *args)

    monkeypatch.setattr(construction.ConstructionMode, "__init__", noting)
    return Counts(builders)


NOTHING = {"written": 0, "read": 0, "homecomings": 0}
LAYER = 4 * H * H


class Packed(nn.Module):
    """Six packed parameters that are initialised after all are made, as the experts of transformers are."""

    def __init__(self, make, initialise, numel=H * H):
        super().__init__()
        self.experts = nn.ParameterList(nn.Parameter(make(2, numel // 2)) for _ in range(6))
        for param in self.experts:
            initialise(param)


@pytest.mark.parametrize(
    ("initialise", "is_written"),
    [(nn.init.normal_, False), (nn.init.zeros_, False), (nn.init.xavier_uniform_, False), (lambda param: param.data[1].fill_(3.0), True)],
)
def test_parameters_of_zeros_take_no_place_in_the_file(initialise, is_written, config, counts):
    torch.manual_seed(0)
    expected = Packed(torch.zeros, initialise)
    torch.manual_seed(0)
    with infinity.init(config, window=0):
        model = Packed(torch.zeros, initialise)
    assert (counts.builders[0].scratch.written_nbytes > 0) == is_written
    with infinity.engine_of(model) as engine:
        for param, other in zip(model.parameters(), expected.parameters(), strict=True):
            assert_same_bits(engine.read_state(param)["weight"], other.detach(), other.shape)


@pytest.mark.parametrize("value", [-0.0, 1e-45])
def test_a_value_with_any_bit_goes_to_the_file(value, config, counts):
    """The only such bit is in the last element."""

    def make(*shape):
        values = torch.zeros(shape)
        values[-1, -1] = value
        return values

    with infinity.init(config, window=0):
        model = Packed(make, lambda param: None, numel=1 << 14)
    assert counts.builders[0].scratch.written_nbytes >= 5 * (1 << 16)
    with infinity.engine_of(model) as engine:
        for param in model.parameters():
            assert_same_bits(engine.read_state(param)["weight"], make(*param.shape), param.shape)


@on_gpu
def test_empty_parameters_of_a_gpu_take_no_place_in_the_file(tmp_path, counts):
    def make(*shape):
        return torch.empty(shape, device="cuda")

    torch.manual_seed(0)
    expected = Packed(make, nn.init.normal_, numel=1 << 20)
    del expected
    torch.manual_seed(0)
    expected = Packed(make, nn.init.normal_, numel=1 << 20)  # in memory with the values of the first one
    torch.manual_seed(0)
    with infinity.init(infinity.Config(swap_dirs=tmp_path, device="cuda", dtype="fp32", host_memory="64MiB"), window=0):
        model = Packed(make, nn.init.normal_, numel=1 << 20)
    assert counts.read() == NOTHING
    with infinity.engine_of(model) as engine:
        for param, other in zip(model.parameters(), expected.parameters(), strict=True):
            assert_same_bits(engine.read_state(param)["weight"], other.detach().cpu(), other.shape)


def layers(initialise):
    def build():
        model = nn.Sequential(*(nn.Linear(H, H, bias=False) for _ in range(6)))
        for layer in model:
            initialise(layer.weight)
        return model

    return build


def by_method(weight):
    with torch.no_grad():
        weight.normal_().zero_()
        weight.uniform_(-1, 2)


def copied(weight):
    with torch.no_grad():
        weight.copy_(torch.arange(H * H).view(H, H))


def replaced(weight):
    weight.data = torch.randn(H, H)


def asked(weight):
    """Reads metadata of the weight."""
    assert weight.shape == (H, H) and weight.stride() == (H, 1) and weight.is_contiguous() and weight.numel() == H * H
    assert weight.is_leaf and weight.device.type == "cpu" and not weight._post_accumulate_grad_hooks and not weight._backward_hooks
    assert torch.empty_like(weight).is_contiguous() and weight.new_zeros(2).eq(0).all()


def frozen(weight):
    weight.requires_grad = False
    weight.requires_grad_(True)
    weight.requires_grad = False


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "build, window, expected",
    [
        (layers(frozen), 0, NOTHING),
        (tiny_gpt, 16 * LAYER, NOTHING),
        (layers(nn.init.normal_), 0, NOTHING),
        (layers(nn.init.xavier_uniform_), 0, NOTHING),
        (layers(by_method), 0, NOTHING),
        (layers(asked), 0, NOTHING),
        (layers(nn.init.trunc_normal_), 6 * LAYER, NOTHING | {"homecomings": 6}),
        (layers(nn.init.trunc_normal_), 4 * LAYER, {"written": 2 * LAYER, "read": 0, "homecomings": 6}),
        (layers(lambda weight: weight.data.normal_()), 4 * LAYER, {"written": 2 * LAYER, "read": 0, "homecomings": 6}),
        (layers(copied), 4 * LAYER, {"written": 2 * LAYER, "read": 0, "homecomings": 0}),
        (layers(replaced), 4 * LAYER, {"written": 2 * LAYER, "read": 0, "homecomings": 0}),
    ],
)
def test_parameters_leave_once_and_overwritten_ones_are_not_read_back(build, window, expected, config, counts):
    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    with infinity.init(config, window=window):
        model = build()
    assert counts.read() == expected
    with infinity.engine_of(model) as engine:
        for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert_same_bits(engine.read_state(param)["weight"], other.detach(), name)


@pytest.mark.slow
def test_the_search_for_layers_to_cut_brings_no_parameter_back(config, counts):
    with infinity.init(dataclasses.replace(config, tile_above="2KiB"), window=0):
        model = tiny_gpt()
    sizes = [param.numel() for param in model.parameters()]
    assert counts.read()["homecomings"] < len(sizes) and max(sizes) <= 512
    infinity.engine_of(model).close()


def test_a_model_that_fits_into_the_window_has_values_after_the_block(config, counts):
    torch.manual_seed(0)
    expected = mlp(3)
    torch.manual_seed(0)
    with infinity.init(config):
        model = mlp(3)
    assert counts.read()["written"] == 0
    for param, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert_same_bits(param.detach(), other.detach(), other.shape)
    infinity.engine_of(model).close()


def test_a_parameter_without_a_module_keeps_its_values(config, counts):
    with infinity.init(config, window=0):
        model = mlp(3)
        kept, shape = model.layers[1].weight, model.layers[1].weight.shape
        nn.init.constant_(kept, 2.5)
        model.layers[1].weight = nn.Parameter(torch.ones(shape))
        alone = nn.Parameter(torch.empty(H, H))
        nn.init.constant_(alone, 1.5)
    assert kept.eq(2.5).all() and alone.eq(1.5).all()
    infinity.engine_of(model).close()


def test_a_parameter_with_a_view_is_drawn_at_once(config, counts):
    with infinity.init(config, window=0):
        layer = nn.Linear(H, H)
        view = layer.weight.detach()[1:]
        nn.init.constant_(layer.weight, 3.0)
        assert view.eq(3.0).all()
        del view
    infinity.engine_of(layer).close()


def test_an_initialiser_that_fails_keeps_the_old_values(config, counts):
    with infinity.init(config, window=0):
        layer = nn.Linear(H, H, bias=False)
        nn.init.constant_(layer.weight, 3.0)
        with pytest.raises(RuntimeError):
            nn.init.normal_(layer.weight, 0.0, -1.0)
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            layer.weight.normal_()
        with pytest.raises(RuntimeError), torch.no_grad():
            layer.weight.copy_(torch.ones(H + 1))
        assert layer.weight.eq(3.0).all()
    infinity.engine_of(layer).close()


def test_a_function_that_replaces_an_initialiser_is_called(config, counts, monkeypatch):
    """transformers and DeepSpeed replace initialisers temporarily."""
    original, kept = nn.init.normal_, set()

    def guarded(tensor, mean=0.0, std=1.0, generator=None):
        return tensor if id(tensor) in kept else original(tensor, mean, std, generator)

    with infinity.init(config, window=0):
        first, second = nn.Linear(H, H, bias=False), nn.Linear(H, H, bias=False)
        nn.init.constant_(first.weight, 3.0)
        monkeypatch.setattr(nn.init, "normal_", guarded)
        kept.add(id(first.weight))
        for layer in (first, second):
            nn.init.normal_(layer.weight)
            original(layer.weight)  # the original calls the mode with the replacement
        monkeypatch.undo()
        assert first.weight.eq(3.0).all() and second.weight.ne(3.0).all()
    for layer in (first, second):
        infinity.engine_of(layer).close()


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_exception_in_a_draw_leaves_no_file_hook_or_thread(error, config, counts, monkeypatch, tmp_path):
    """The third draw raises, with one parameter in the scratch file."""
    write, drawn = draws.Drawn.write, []

    def broken(self, out, num_threads):
        write(self, out, num_threads)
        drawn.append(self)
        if len(drawn) == 3:
            raise error

    monkeypatch.setattr(draws.Drawn, "write", broken)
    with pytest.raises(error), infinity.init(config, window=0):
        layers(lambda weight: weight.data.normal_())()
    assert counts.read()["written"] == LAYER
    assert not nn.modules.module._global_parameter_registration_hooks and not everything_in(tmp_path)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("infinity-draw")]
    monkeypatch.undo()
    layer = nn.Linear(H, H)
    nn.init.ones_(layer.weight)
    assert layer.weight.eq(1).all()


def saved_llama(folder):
    """Saves a small Llama in several files. Returns the function that loads such a model."""
    transformers = pytest.importorskip("transformers")
    settings = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(settings).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) >= 3
    return transformers.LlamaForCausalLM.from_pretrained


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("window", [0, 1 << 30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_model_loaded_from_files_needs_no_scratch_file(dtype, window, config, counts, tmp_path):
    """Mapped parameters stay in their file. Converted ones are in host memory. If they exceed the window, they go to the scratch file."""
    load = saved_llama(tmp_path / "saved")
    expected = load(tmp_path / "saved", dtype=dtype)
    config = dataclasses.replace(config, dtype="bf16" if dtype is torch.bfloat16 else "fp32")
    with infinity.init(config, window=window):
        model = load(tmp_path / "saved", dtype=dtype)
    found = counts.read()
    assert found["homecomings"] == found["read"] == 0
    if dtype is torch.bfloat16 or window:
        assert found["written"] == 0
    else:
        assert found["written"] <= sum(param.numel() * 4 for param in expected.parameters())
    with infinity.engine_of(model) as engine:
        for (name, param), other in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert_same_bits(engine.read_state(param)["weight"], other.detach(), name)
        for (name, buffer), other in zip(model.named_buffers(), expected.buffers(), strict=True):
            assert torch.equal(buffer, other), name


def test_memory_of_mapped_files_counts_as_free_once(monkeypatch, tmp_path):
    """Mapped pages are in the page cache, which free host memory already includes."""
    path = tmp_path / "values"
    path.write_bytes(bytes(1 << 20))
    mapped = nn.Parameter(torch.from_file(str(path), shared=False, size=1 << 18))
    monkeypatch.setattr("infinity.engine.sizing.host_free_nbytes", lambda: 1 << 40)
    settings, device = infinity.Config(swap_dirs=tmp_path, device="cpu"), torch.device("cpu")
    assert budgets(settings, device, Ranks(device), [mapped]) == budgets(settings, device, Ranks(device))
    other = nn.Parameter(mapped.detach().clone())
    assert sum(budgets(settings, device, Ranks(device), [other])) == (1 << 40) * 3 // 4 + (3 << 18)


def test_a_draw_ignores_the_programs_default_device(config, counts):
    with infinity.init(config, window=4 * LAYER):
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(H, H, bias=False, device="cpu") for _ in range(6)))
            for layer in model:
                layer.weight.data.fill_(2.0)
            assert counts.builders[0].scratch.written_nbytes == 2 * LAYER
            assert model[0].weight.eq(2.0).all() and model[0].weight.device.type == "cpu"
    infinity.engine_of(model).close()


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "compression, host_memory, num_late", [("auto", "auto", 2), ("auto", "128KiB", 0), ("off", "auto", 0)], ids=["late", "little", "off"]
)
def test_first_moments_are_not_written_to_nvme(compression, host_memory, num_late, dtype, tmp_path, counts):
    """All moments are zero before the first update. host_memory: with and without room for gradients of late moments. dtype: of the model's
    values. The residual of a bf16 value is zero too."""
    config = infinity.Config(
        swap_dirs=tmp_path,
        device="cpu",
        dtype="bf16",
        param_tier="nvme",
        optimizer_state_tier="nvme",
        residency="none",
        compression=compression,
        chunk_mib=1 / 64,
        host_memory=host_memory,
    )
    make = lambda: mlp(6).to(TORCH_DTYPES[dtype])
    torch.manual_seed(0)
    expected = make()
    torch.manual_seed(0)
    with infinity.init(config):
        model = make()
    infinity.AdamW(model.parameters())
    with infinity.engine_of(model) as engine:
        assert engine.placement.num_late == num_late
        records = [chunk.record for chunk in engine.registry.chunks]
        written = {"weight"} if dtype == "bf16" else {"weight", "residual"}
        segments = [segment for record in records for kind in (WEIGHTS, STATES) for segment in record.of(kind)]
        assert engine.stats()["nvme_write_nbytes"] == sum(nbytes for segment, _, nbytes in segments if segment.name in written)
        for param, other in zip(model.parameters(), expected.parameters(), strict=True):
            state = engine.read_state(param)
            assert_same_bits(state.pop("weight"), other.detach().bfloat16(), other.shape)
            assert all(value.eq(0).all() for name, value in state.items() if name not in written) and len(state) == 3


def test_calls_per_parameter_do_not_grow_with_the_number_of_parameters(tmp_path, monkeypatch):
    counts = []
    for num_layers in (100, 200):
        calls = []
        asked = construction.ConstructionMode.__torch_function__
        monkeypatch.setattr(construction.ConstructionMode, "__torch_function__", lambda *args, **how: calls.append(1) or asked(*args, **how))
        with infinity.init(infinity.Config(swap_dirs=tmp_path, device="cpu", host_memory="64MiB"), window=1 << 20):
            nn.Sequential(*(nn.Linear(256, 256) for _ in range(num_layers)))
        monkeypatch.undo()
        counts.append(len(calls) / num_layers)
    assert counts[1] < 1.2 * counts[0], counts


# ---- infinity.gathered before the optimizer ----

OPTIONS = {"plain": {}, "clips": {"max_grad_norm": 1.0}, "accumulates": {"accumulation_steps": 2}}


def taken_from(way, config, window):
    """A model of four layers in an engine, and an equal model without an engine."""
    torch.manual_seed(0)
    plain = mlp(4)
    torch.manual_seed(0)
    if way == "offload":
        model = mlp(4)
        infinity.offload(model, config)
        return model, plain
    with infinity.init(config, window=window):
        model = mlp(4)
    return model, plain


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("way, window", [("init", 1), ("init", None), ("offload", None)], ids=["away", "home", "offload"])
def test_values_may_be_changed_before_the_optimizer_exists(way, window, options, config):
    model, plain = taken_from(way, config, window)
    for each in (model, plain):
        with torch.no_grad(), infinity.gathered(list(each.parameters())) if each is model else contextlib.nullcontext():
            for number, param in enumerate(each.parameters()):
                param.mul_(number)
    with infinity.engine_of(model) as engine:
        assert not engine.has_started
        infinity.AdamW(model.parameters(), **options)
        for (name, value), other in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
            assert_same_bits(value, other, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_loaded_values_may_be_gathered_before_the_optimizer_exists(dtype, config):
    with infinity.init(config, window=1):
        model = mlp(4).to(dtype)
    torch.manual_seed(1)
    loaded = mlp(4).state_dict()
    model.load_state_dict(loaded)
    for name, param in model.named_parameters():
        with torch.no_grad(), infinity.gathered(param):
            assert_same_bits(param, loaded[name].to(dtype), name)
            param.mul_(2)
    with infinity.engine_of(model):
        infinity.AdamW(model.parameters(), max_grad_norm=1.0)
        for name, value in model.state_dict().items():
            assert_same_bits(value, (loaded[name].to(dtype) * 2).float(), name)


def test_gathered_values_return_to_the_scratch_file(config, counts):
    with infinity.init(config, window=LAYER):
        model = mlp(6)
    before = counts.builders[0].scratch.written_nbytes
    for param in model.parameters():
        with infinity.gathered(param), torch.no_grad():
            param.add_(1.0)
    assert counts.builders[0].scratch.written_nbytes - before >= 4 * LAYER
    with infinity.engine_of(model):
        infinity.AdamW(model.parameters(), max_grad_norm=1.0)


def test_a_change_before_the_optimizer_is_kept_when_the_block_raises(config):
    model, _ = taken_from("init", config, 1)
    with pytest.raises(KeyError), infinity.gathered(model.layers[0].weight), torch.no_grad():
        model.layers[0].weight.fill_(3.0)
        raise KeyError
    with infinity.engine_of(model):
        infinity.AdamW(model.parameters(), max_grad_norm=1.0)
        assert (model.state_dict()["layers.0.weight"] == 3.0).all()


def test_the_engine_may_start_while_values_are_gathered(config):
    model, plain = taken_from("init", config, 1)
    with infinity.gathered(list(model.parameters())), torch.no_grad():
        model.layers[0].weight.fill_(3.0)
        infinity.AdamW(model.parameters(), max_grad_norm=1.0)
    with infinity.engine_of(model):
        assert (model.state_dict()["layers.0.weight"] == 3.0).all()
        assert_same_bits(model.state_dict()["layers.1.weight"], plain.layers[1].weight.detach(), "layers.1.weight")


def changed_on_rank_0(folder):
    torch.manual_seed(0)
    with infinity.init(infinity.Config(swap_dirs=folder, device="cpu", dtype="fp32", host_memory="64MiB"), window=1):
        model = mlp(4)
    with infinity.engine_of(model) as engine:
        for param in model.parameters():
            with torch.no_grad(), infinity.gathered(param):
                param.fill_(1.0 + engine.ranks.rank)
        infinity.AdamW(model.parameters(), max_grad_norm=1.0)
        return all((value == 1.0).all() for value in model.state_dict().values())


@pytest.mark.slow
def test_values_of_rank_0_win_before_the_optimizer_exists(tmp_path):
    world = World(2, tmp_path)
    try:
        assert world.run(changed_on_rank_0, tmp_path) == [True, True]
    finally:
        world.close()


@pytest.mark.parametrize("free_gib, left_gib", [(16, 2.1), (61, 7.9), (64, 8.0), (96, 8.0), (128, 10.2), (1024, 81.9)])
def test_host_memory_left_to_the_program_beside_cuda(free_gib, left_gib):
    assert (1 - host_share("cuda", free_gib << 30)) * free_gib == pytest.approx(left_gib, abs=0.1)


def test_half_of_the_free_memory_is_for_the_host_tier_without_cuda():
    assert host_share("cpu", 1 << 40) == 0.5
    assert host_share("cuda", 0) > 0  # a control group may leave nothing
