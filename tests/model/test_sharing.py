"""Parameters that share memory are refused with a line that ties them. Parameters cut from one tensor are accepted."""

import re

import pytest
import torch
from support.helpers import plain
from support.models import H, Model
from torch import nn

import infinity
from infinity.errors import ConfigError
from infinity.model.shared_parameters import part_versions, refuse_shared

VOCAB = 50


def tied(tie):
    """A model class with an embedding and a head. `tie(model)` is the last line of the constructor."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(VOCAB, H), nn.Linear(H, VOCAB, bias=False)
            self.layers = nn.Sequential(nn.Linear(H, H), nn.Linear(H, H))
            tie(self)

        def forward(self, x):
            return self.head(self.layers(self.embedding(x)))

    return Tied


def by_data(self):
    self.head.weight.data = self.embedding.weight.data


def by_a_parameter_of_its_data(self):
    self.head.weight = nn.Parameter(self.embedding.weight.data)


def by_a_parameter_of_it(self):
    self.head.weight = nn.Parameter(self.embedding.weight)


def by_detach(self):
    self.head.weight.data = self.embedding.weight.detach()


def by_set(self):
    with torch.no_grad():
        self.head.weight.set_(self.embedding.weight)


def by_numpy(self):
    array = self.embedding.weight.detach().numpy()
    self.head.weight.data = torch.from_numpy(array)


def in_a_list(self):
    self.layers[1].bias.data = self.layers[0].bias.data


def by_a_transposed_view(self):
    self.back = nn.Parameter(self.embedding.weight.data.t())


def by_a_row(self):
    self.layers[0].bias.data = self.embedding.weight.data[3]


def by_a_column(self):
    self.row = nn.Parameter(self.layers[0].weight.data[:, 1])


def in_part(self):
    memory = torch.randn(3 * H)
    self.low, self.high = nn.Parameter(memory[: 2 * H]), nn.Parameter(memory[H:])


def under_another_dtype(self):
    self.bits = nn.Parameter(self.layers[0].weight.data.view(torch.int32), requires_grad=False)


def by_a_buffer(self):
    self.register_buffer("table", self.embedding.weight.data)


def by_a_child_s_buffer(self):
    self.layers[0].register_buffer("first", self.embedding.weight.detach()[0], persistent=False)


def by_an_attribute(self):
    self.cached = self.head.weight.detach()


def by_an_attribute_with_a_graph(self):
    self.transposed = self.head.weight.t()


def in_an_attribute_s_list(self):
    self.cache = [None, self.head.weight.data]


def in_an_attribute_s_dict(self):
    self.cache = {"head": self.head.weight.data}


ONE_PARAMETER = [by_data, by_a_parameter_of_its_data, by_a_parameter_of_it, by_detach, by_set, by_numpy, in_a_list]
SHARED = [by_a_transposed_view, by_a_row, by_a_column, in_part, under_another_dtype]
STALE = [by_a_buffer, by_a_child_s_buffer, by_an_attribute, by_an_attribute_with_a_graph, in_an_attribute_s_list, in_an_attribute_s_dict]
MEANT = {
    by_data: "model.head.weight = model.embedding.weight",
    in_a_list: "model.layers[1].bias = model.layers[0].bias",
    by_a_row: "model.layers[0].bias.data = model.layers[0].bias.data.clone()",
    by_a_child_s_buffer: "model.layers[0].first = model.layers[0].first.detach().clone()",
    in_an_attribute_s_list: "model.cache[1] = model.cache[1].detach().clone()",
    in_an_attribute_s_dict: "model.cache['head'] = model.cache['head'].detach().clone()",
}


def losses(model, optimizer, steps=5):
    torch.manual_seed(1)
    for _ in range(steps):
        x = torch.randint(0, VOCAB, (4, 7))
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def offloaded(make, config):
    model = make()
    infinity.offload(model, config)
    return model


def built_inside(make, config):
    with infinity.init(config, window=0):
        model = make()
    return model


@pytest.mark.slow
@pytest.mark.few(6)
@pytest.mark.parametrize("taken", [offloaded, built_inside])
@pytest.mark.parametrize("way", [*ONE_PARAMETER, *SHARED, *STALE], ids=lambda way: way.__name__)
def test_shared_memory_is_refused_with_the_line_to_write(way, taken, tmp_path):
    config = infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", param_tier="nvme", optimizer_state_tier="nvme", residency="none", host_memory="64MiB")
    torch.manual_seed(0)
    with pytest.raises(ConfigError) as refusal:
        taken(tied(way), config)
    line = re.search(r"`([^`]* = [^`]*)`\.$", str(refusal.value))[1]
    assert line == MEANT.get(way, line)

    def mended(self):
        way(self)
        exec(line, {"model": self})

    torch.manual_seed(0)
    expected_model = tied(mended)()
    torch.manual_seed(0)
    model = taken(tied(mended), config)
    trained = [[p for p in m.parameters() if p.requires_grad] for m in (expected_model, model)]
    expected = [*losses(expected_model, torch.optim.SGD(trained[0], lr=0.5))]
    assert [*losses(model, infinity.SGD(trained[1], lr=0.5))] == pytest.approx(expected, rel=1e-6)
    assert (model.head.weight is model.embedding.weight) == (way in ONE_PARAMETER and way is not in_a_list)
    infinity.engine_of(model).close()


def test_a_refused_model_is_unchanged_and_accepted_after_the_fix(tmp_path):
    model = tied(by_data)()
    names = {name: id(param) for name, param in model.named_parameters()}
    config = infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", tile_above=1024)
    with pytest.raises(ConfigError, match="two parameters in the same memory"):
        infinity.offload(model, config)
    assert {name: id(param) for name, param in model.named_parameters()} == names
    model.head.weight = model.embedding.weight
    with infinity.offload(model, config):
        infinity.AdamW(model.parameters())


def test_sharing_begun_after_offload_is_refused_at_the_start(tmp_path):
    model = tied(lambda self: None)()
    with infinity.offload(model, infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32")):
        model.head.weight.data = model.embedding.weight.data
        with pytest.raises(ConfigError, match="embedding.weight and head.weight"):
            infinity.AdamW(model.parameters())


# Shared memory that is no error.


def cut(dim):
    """Three parameters that are parts of one tensor, with the program's hooks."""

    def build(self):
        qkv = torch.randn(3 * H, H) if dim == 0 else torch.randn(H, 3 * H)
        self.q, self.k, self.v = (nn.Parameter(part if type(self).whole else part.clone()) for part in qkv.chunk(3, dim))
        self.out = nn.Linear(H, H)
        self.seen = []
        self.q.register_hook(lambda grad: grad * 2)
        self.k.register_post_accumulate_grad_hook(lambda param: self.seen.append(param is self.k))

    def run(self, x):
        return self.out((x @ self.q * (x @ self.k)).sigmoid() * (x @ self.v))

    class Cut(Model):
        whole = True

    return Cut, build, run


def made(dim, whole):
    kind, build, run = cut(dim)
    kind.whole = whole
    return kind(build, run)


@pytest.mark.few(2)
@pytest.mark.parametrize("update", ["deferred", "backward"])
@pytest.mark.parametrize("taken", [offloaded, built_inside])
@pytest.mark.parametrize("dim", [0, 1])
def test_parameters_cut_from_one_tensor_train_like_separate_ones(dim, taken, update, tmp_path):
    config = dict(swap_dirs=tmp_path, device="cpu", dtype="fp32", chunk_mib=1 / 512, param_tier="nvme", optimizer_state_tier="nvme", residency="none")
    config = infinity.Config(**config, host_memory="64MiB", update=update)
    expected_model, reference = plain(lambda: made(dim, whole=False), options={"lr": 0.1})
    torch.manual_seed(0)
    model = taken(lambda: made(dim, whole=True), config)
    kept = {name: id(param) for name, param in model.named_parameters()}
    optimizer = infinity.AdamW(model.parameters(), lr=0.1)
    for step in range(4):
        x, found = torch.randn(4, H), []
        for m, o in ((expected_model, reference), (model, optimizer)):
            loss = (m(x) - step).square().mean()
            loss.backward()
            o.step()
            o.zero_grad()
            found.append(loss.item())
        assert found[0] == found[1], f"step {step}"
    for (name, value), expected in zip(model.state_dict().items(), expected_model.state_dict().values(), strict=True):
        assert torch.equal(value, expected), name
    assert {name: id(param) for name, param in model.named_parameters()} == kept
    assert model.seen == [True] * 4
    infinity.engine_of(model).close()


def test_version_counters_are_separated_after_a_change_of_dtype():
    parts = [nn.Parameter(part) for part in torch.randn(6, 4, dtype=torch.float64).chunk(3)]
    for part in parts:
        part.data = part.data.float()  # like model.float(): new memory, but the version counter stays shared
    torch.autograd.graph.increment_version(parts[0])
    assert [part._version for part in parts] == [1, 1, 1]
    kept = [part.data_ptr() for part in parts]
    parts[1].grad, parts[1].tag = torch.ones(2, 4), "mine"
    part_versions(parts)
    before = [part._version for part in parts]
    torch.autograd.graph.increment_version(parts[0])
    assert [now._version - then for now, then in zip(parts, before)] == [1, 0, 0]
    assert [part.data_ptr() for part in parts] == kept
    assert parts[1].grad.sum() == 8 and parts[1].tag == "mine"


def no_fault():
    """Memory is shared with tensors that no engine moves, and by interleaved parameters."""
    module = nn.Module()
    module.register_buffer("mask", torch.ones(4, 4))
    module.rows = module.mask.view(-1)
    memory = torch.randn(4, 6)
    module.even, module.odd = nn.Parameter(memory[:, ::2]), nn.Parameter(memory[:, 1::2])
    module.lstm = nn.LSTM(4, 4)
    module.normed = nn.utils.spectral_norm(nn.Linear(4, 4))
    module.whole = nn.Parameter(torch.randn(3, 3))
    module.again, module.listed = module.whole, [module.whole, {"x": module.whole}]
    module.__dict__["beside"] = module.whole
    module.order = nn.Parameter(torch.arange(4), requires_grad=False)
    module.register_buffer("same_order", module.order.data)
    module.empty, module.lazy = nn.Parameter(torch.empty(0)), nn.LazyLinear(3)
    module.sparse = torch.eye(3).to_sparse()
    return module


def test_harmless_sharing_is_accepted():
    refuse_shared(no_fault())
