"""An optimizer's state_dict and optimizer.state have no moments and say so. DTensors, tied tensors and a GradScaler are handled."""

import io
import json

import pytest
import torch
from support.helpers import NVME, assert_same_states, states_of, training
from support.models import inputs, loss_of, mlp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import infinity
from infinity.errors import CheckpointError, ConfigError, UsageError

pytestmark = pytest.mark.usefixtures("one_thread")


def train(model, optimizer, step=0):
    loss_of(model(inputs(model, step).to(next(model.parameters()).dtype)).float()).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_state_dict_without_moments_says_so_and_names_infinity_save(tmp_path):
    with training(mlp, tmp_path, **NVME) as (model, engine, optimizer):
        train(model, optimizer)
        with pytest.warns(UserWarning, match=r"state_dict\(\) has hyper-parameters, no moments and no step counts: use infinity.save and infinity.load"):
            found = optimizer.state_dict()
        param = next(model.parameters())
        for read in (
            lambda: found["state"][0],
            lambda: found["state"].get(0),
            lambda: 0 in found["state"],
            lambda: bool(found["state"]),
            lambda: optimizer.state[param]["exp_avg"],
            lambda: optimizer.state.get(param),
        ):
            with pytest.raises(UsageError, match="an optimizer's states live in the engine's tiers .*: use infinity.save and infinity.load"):
                read()
        assert "infinity.save" in repr(found["state"]) and list(found["state"].items()) == [] == list(optimizer.state.items())
        found["param_groups"][0]["lr"] = 0.125
        optimizer.load_state_dict(found)
        optimizer.load_state_dict({"state": {}, "param_groups": found["param_groups"]})
        assert optimizer.param_groups[0]["lr"] == 0.125
        with pytest.raises(UsageError, match="are not loaded from a dict"):
            optimizer.load_state_dict({"state": {0: {"step": 1}}, "param_groups": found["param_groups"]})
        with pytest.raises(UsageError):
            bool(optimizer.state)
        infinity.save(tmp_path / "saved", model, optimizer)
        expected = states_of(engine, model)
        train(model, optimizer, 1)
        infinity.load(tmp_path / "saved", model, optimizer)
        assert_same_states(states_of(engine, model), expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("wait", [True, False])
def test_a_state_dict_after_a_save_refers_to_the_checkpoint(tmp_path, wait):
    with training(mlp, tmp_path, **NVME) as (model, engine, optimizer):
        for step in range(3):
            train(model, optimizer, step)
        infinity.save(tmp_path / "saved", model, optimizer, wait=wait)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        expected = states_of(engine, model)
        train(model, optimizer, 3)
        with pytest.warns(UserWarning, match="no moments"), pytest.raises(UsageError, match="After infinity.save"):
            torch.save(optimizer.state_dict(), io.BytesIO())
        optimizer.param_groups[0]["lr"] = 0.5
    found = torch.load(file, weights_only=True)
    (folder,) = (tmp_path / "saved").glob("data-*")
    assert found["infinity"] == {"checkpoint": str(tmp_path / "saved"), "folder": folder.name}
    assert found["state"] == {index: {"step": 3} for index in range(len(found["state"]))} and len(found["state"]) == len(expected)
    with training(mlp, tmp_path / "again", seed=1, options={"lr": 0.25}, **NVME) as (model, engine, optimizer):
        optimizer.load_state_dict(found)
        assert_same_states(states_of(engine, model), expected)
        assert optimizer.param_groups[0]["lr"] == 1e-2
        assert optimizer.state_dict() == found, "no step since the load, so the dict must be the loaded one"
        infinity.load(tmp_path / "saved", model)
        with pytest.warns(UserWarning, match="no moments"):
            optimizer.state_dict()


def test_a_state_dict_of_a_replaced_checkpoint_is_refused(tmp_path):
    with training(mlp, tmp_path, **NVME) as (model, engine, optimizer):
        found = []
        for step in range(2):
            train(model, optimizer, step)
            infinity.save(tmp_path / "saved", model, optimizer)
            found.append(optimizer.state_dict())
        expected = states_of(engine, model)
        with pytest.raises(CheckpointError, match="saved is not the checkpoint that the state_dict refers to"):
            optimizer.load_state_dict(found[0])
        assert_same_states(states_of(engine, model), expected)
        (tmp_path / "saved").rename(tmp_path / "moved")
        train(model, optimizer, 2)
        with pytest.raises(CheckpointError, match="saved is not a directory"):
            optimizer.load_state_dict(found[1])


def test_loading_the_own_state_dict_keeps_changed_weights(tmp_path):
    with training(mlp, tmp_path, **NVME) as (model, engine, optimizer):
        train(model, optimizer)
        infinity.save(tmp_path / "saved", model, optimizer)
        expected = {name: value + 1 for name, value in model.state_dict().items()}
        model.load_state_dict(expected)
        optimizer.load_state_dict(optimizer.state_dict())
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_after_load_dcp_the_state_dict_refers_to_no_checkpoint(tmp_path):
    with training(mlp, tmp_path, **NVME) as (model, engine, optimizer):
        train(model, optimizer)
        infinity.save_dcp(tmp_path / "dcp", model, optimizer)
        train(model, optimizer, 1)
        infinity.save(tmp_path / "saved", model, optimizer)
        infinity.load_dcp(tmp_path / "dcp", model, optimizer, trust_pickle=True)
        with pytest.warns(UserWarning, match="no moments"):
            assert "infinity" not in optimizer.state_dict()


@pytest.mark.filterwarnings("ignore:optimizer.state_dict")
def test_torchs_get_state_dict_is_refused_and_changes_nothing(tmp_path):
    with training(mlp, tmp_path, **NVME) as (model, engine, optimizer):
        train(model, optimizer)
        expected = states_of(engine, model)
        for ask in (
            lambda: get_state_dict(model, optimizer),
            lambda: set_state_dict(model, optimizer, model_state_dict=model.state_dict(), optim_state_dict={"state": {}, "param_groups": []}),
        ):
            with pytest.raises(UsageError, match="an optimizer's states live .* or infinity.save_dcp and load_dcp for other engines"):
                ask()
        assert_same_states(states_of(engine, model), expected)
        train(model, optimizer, 1)
        expected = states_of(engine, model)
        infinity.save_dcp(tmp_path / "dcp", model, optimizer)
        train(model, optimizer, 2)
        infinity.load_dcp(tmp_path / "dcp", model, optimizer, trust_pickle=True)
        assert_same_states(states_of(engine, model), expected)


@pytest.fixture
def alone(tmp_path):
    """A process group of one rank."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_dtensor_is_refused_by_name_before_the_engine_exists(tmp_path, alone):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain = model[1].weight
    mesh = init_device_mesh("cpu", (1,))
    model[1].weight = nn.Parameter(distribute_tensor(plain.detach(), mesh, [Replicate()]))
    config = infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32")
    with pytest.raises(ConfigError, match="1.weight is a DTensor, .* give the plain model, without fully_shard or distribute_tensor"):
        infinity.offload(model, config)
    model[1].weight = plain
    with infinity.offload(model, config):
        train_once = infinity.AdamW(model.parameters())
        model(torch.ones(2, 4)).sum().backward()
        train_once.step()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
        self.head.weight = self.token.weight


def test_tied_names_are_one_tensor_in_a_state_dict(tmp_path):
    model = Tied()
    with infinity.offload(model, infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", **NVME)):
        found, again = model.state_dict(), model.state_dict()
        assert found["token.weight"] is found["head.weight"]
        assert again["token.weight"].data_ptr() != found["token.weight"].data_ptr(), "each call must return separate memory"
        mine = {}
        model.state_dict(destination=mine)
        assert torch.equal(mine["head.weight"], found["token.weight"])


def test_tied_tiled_layers_are_one_tensor_in_a_state_dict(tmp_path):
    model = Tied()
    expected = model.token.weight.detach().clone()
    with infinity.offload(model, infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", tile_above=1024, **NVME)):
        assert len(list(model.parameters())) > 1
        found = model.state_dict()
        assert list(found) == ["token.weight", "head.weight"] and found["token.weight"] is found["head.weight"]
        assert torch.equal(found["head.weight"], expected) and torch.equal(model.state_dict(destination={})["head.weight"], expected)


def test_save_pretrained_writes_a_tied_head_once(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=96, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "plain")
    with infinity.offload(model, infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", **NVME)):
        model.save_pretrained(tmp_path / "ours")
    names = []
    for folder in ("plain", "ours"):
        raw = (tmp_path / folder / "model.safetensors").read_bytes()
        names.append(sorted(json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])))
    assert names[0] == names[1] and "lm_head.weight" not in names[1]
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours")
    assert again.lm_head.weight is again.transformer.wte.weight


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_grad_scaler_is_refused_with_a_remedy(tmp_path, dtype):
    with training(mlp, tmp_path, dtype=dtype) as (model, engine, optimizer):
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model(inputs(model, 0).to(next(model.parameters()).dtype)).float())).backward()
        with pytest.raises(UsageError, match=r"torch.amp.GradScaler .* Leave the scaler out. With dtype='fp16' .* loss_scale=infinity.LossScale"):
            scaler.step(optimizer)
        optimizer.zero_grad()
        train(model, optimizer)
