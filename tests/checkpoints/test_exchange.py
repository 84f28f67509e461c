"""Export to safetensors, import from safetensors, and resharding for other world sizes: names, bits, memory and refusals."""

import copy
import json
import textwrap

import pytest
import torch
from support.helpers import assert_same_bits, assert_same_states, bits, states_of
from torch import nn

import infinity
from infinity.checkpoints.convert import export, reshard
from infinity.checkpoints.reader import Checkpoint
from infinity.checkpoints.safetensors import TensorFiles
from infinity.checkpoints.safetensors_format import TensorSpec
from infinity.checkpoints.safetensors_writer import write_files
from infinity.model.gpt import GPT
from infinity.optim.adam import split_master

SMALL = {"device": "cpu", "chunk_mib": 0.02}


class Odd(nn.Module):
    """A tied head, a frozen layer, buffers, a scalar, and a layer that is tiled along both dimensions."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(40, 24)
        self.wide = infinity.TiledLinear(24, 36, out_tiles=3, in_tiles=2)
        self.frozen = nn.Linear(36, 24).requires_grad_(False)
        self.register_buffer("running", torch.zeros(24))
        self.register_buffer("seen", torch.tensor(0))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(24, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.frozen(self.wide(self.embedding(tokens)).relu())
        with torch.no_grad():
            self.running += x.float().mean(0)
            self.seen += 1
        return self.head(x * self.scale)


def made(folder, build, *, seed=0, window=1 << 30, **config):
    folder.mkdir(exist_ok=True)
    torch.manual_seed(seed)
    with infinity.init(infinity.Config(swap_dirs=folder, **SMALL | config), window=window):
        model = build()
    return model


def trained(folder, build, steps=2, **config):
    model = made(folder, build, **config)
    optimizer = infinity.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        model(torch.randint(40, (6,), generator=generator)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp16"])
def test_an_exported_checkpoint_has_the_weights_under_the_models_names(tmp_path, dtype):
    model, optimizer = trained(tmp_path / "swap", Odd, dtype=dtype)
    with infinity.engine_of(model) as engine:
        infinity.save(tmp_path / "saved", model, optimizer)
        weights, states = model.state_dict(), states_of(engine, model)
    export(tmp_path / "saved", tmp_path / "out", dtype=dtype)
    with TensorFiles(tmp_path / "out") as files:
        assert files.names.keys() == weights.keys() - {"head.weight"}
        assert files.metadata["tied:head.weight"] == "embedding.weight"
        for name, info in files.names.items():
            assert_same_bits(files.read(name).view(info.shape), weights[name], name)
    export(tmp_path / "saved", tmp_path / "masters", dtype="fp32")
    with TensorFiles(tmp_path / "masters") as files:
        state = states["frozen.weight"]["weight"].float()
        assert_same_bits(files.read("frozen.weight"), state.reshape(-1), "frozen")
        if dtype == "bf16":
            state = states["embedding.weight"]
            master = bits(state["weight"]).int() * 65536 + state["residual"].int()
            assert torch.equal(bits(files.read("embedding.weight").view(40, 24)), master)
        if dtype == "fp16":
            assert_same_bits(files.read("embedding.weight").view(40, 24), states["embedding.weight"]["master"], "master")


def test_transformers_loads_exported_weights(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 60, "n_positions": 16}
    settings = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    model = made(tmp_path / "swap", lambda: transformers.GPT2LMHeadModel(settings), dtype="fp32", tile_above="4KiB")
    optimizer = infinity.AdamW(model.parameters())
    with infinity.engine_of(model):
        infinity.save(tmp_path / "saved", model, optimizer)
        weights = model.state_dict()
    export(tmp_path / "saved", tmp_path / "out", dtype="fp32", max_file_nbytes=30_000)
    settings.save_pretrained(tmp_path / "out")
    loaded, info = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for name, value in loaded.state_dict().items():
        assert_same_bits(value, weights[name], name)
    again = made(tmp_path / "swap2", lambda: transformers.GPT2LMHeadModel(settings), seed=9, dtype="fp32")
    infinity.load_safetensors(again, tmp_path / "out")
    infinity.AdamW(again.parameters())
    with infinity.engine_of(again):
        for name, value in again.state_dict().items():
            assert_same_bits(value, weights[name], name)


@pytest.mark.few(5)
@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp16"])
@pytest.mark.parametrize("window", [0, 1 << 30])
def test_load_safetensors_loads_weights_masters_and_buffers(tmp_path, dtype, started, window):
    torch.manual_seed(3)
    plain = Odd()
    plain.running += 0.25
    values = {name: value for name, value in plain.state_dict().items() if name != "embedding.weight"}  # only the other tied name is saved
    specs = [TensorSpec(name, value.dtype, tuple(value.shape)) for name, value in values.items()]
    write_files(tmp_path / "files", specs, lambda spec: [values[spec.name].reshape(-1)], max_file_nbytes=4000)
    model = made(tmp_path / "swap", Odd, window=window, dtype=dtype)
    if started:
        infinity.AdamW(model.parameters())
    infinity.load_safetensors(model, tmp_path / "files")
    before = {name: value.clone() for name, value in model.state_dict().items()} if not started else None
    if not started:
        infinity.AdamW(model.parameters())
    with infinity.engine_of(model) as engine:
        state = engine.read_state(model.embedding.weight)
        masters = {"bf16": lambda: bits(state["weight"]).int() * 65536 + state["residual"].int(), "fp16": lambda: bits(state["master"])}
        got = masters.get(dtype, lambda: bits(state["weight"]))()
        assert torch.equal(got, bits(plain.embedding.weight.detach()))
        for name, value in model.state_dict().items():
            expected = plain.state_dict()[name]
            if expected.is_floating_point() and name != "running":
                whole = expected.reshape(-1)
                whole = split_master(whole)[0] if dtype == "bf16" else whole.to(value.dtype)
                expected = whole.view(expected.shape)
            assert_same_bits(value, expected, name)
            if before is not None and dtype != "bf16":
                assert_same_bits(before[name], value, name)


def test_one_error_names_all_mismatched_tensors_and_nothing_changes(tmp_path):
    model = made(tmp_path / "swap", Odd, dtype="fp32")
    infinity.AdamW(model.parameters())
    values = {"embedding.weight": torch.ones(40, 23), "stray": torch.ones(3), "scale": torch.tensor(9.0)}
    specs = [TensorSpec(name, value.dtype, tuple(value.shape)) for name, value in values.items()]
    write_files(tmp_path / "files", specs, lambda spec: [values[spec.name].reshape(-1)])
    with infinity.engine_of(model):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(infinity.CheckpointError) as caught:
            infinity.load_safetensors(model, tmp_path / "files")
        assert "from_pretrained" not in str(caught.value)
        for words in ("embedding.weight has shape [40, 23] in the files and [40, 24]", "missing in the files: wide.weight", "unknown to the model: stray"):
            assert words in str(caught.value)
        for name, value in model.state_dict().items():
            assert_same_bits(value, before[name], name)
        del values["embedding.weight"]
        write_files(tmp_path / "some", specs[1:], lambda spec: [values[spec.name].reshape(-1)])
        infinity.load_safetensors(model, tmp_path / "some", strict=False)
        assert model.state_dict()["scale"] == 9
        write_files(tmp_path / "none", specs[1:2], lambda spec: [values[spec.name].reshape(-1)])
        with pytest.raises(infinity.CheckpointError, match="unknown to the model: stray"):  # no tensor of the files would be loaded
            infinity.load_safetensors(model, tmp_path / "none", strict=False)


TEXT = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
IMAGE = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, image_size=28, patch_size=14)
SMALL_HEADS = TEXT | {"head_dim": 8}
QWEN = TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}, "bos_token_id": 1, "eos_token_id": 2}
RENAMED = {  # models whose files use other names: transformers' name of the configuration class -> settings
    "Mixtral": lambda config: config(**TEXT, num_local_experts=2),
    "Llava": lambda config: config(vision_config={"model_type": "clip_vision_model", **IMAGE}, text_config={"model_type": "llama", **TEXT}),
    "PaliGemma": lambda config: config(vision_config=IMAGE, text_config=SMALL_HEADS, projection_dim=32, hidden_size=32),
    "Gemma3": lambda config: config(vision_config=IMAGE, text_config=SMALL_HEADS, mm_tokens_per_image=4),
    "Qwen2VL": lambda config: config(text_config=QWEN, vision_config=dict(depth=1, embed_dim=32, num_heads=4, hidden_size=32)),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", RENAMED)
def test_the_refusal_of_renamed_tensors_shows_the_code_that_loads_them(tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    kind_of = getattr(transformers, f"{kind}ForCausalLM" if kind == "Mixtral" else f"{kind}ForConditionalGeneration")
    build = lambda: kind_of(RENAMED[kind](getattr(transformers, f"{kind}Config")))
    torch.manual_seed(1)
    plain = build()
    plain.save_pretrained(tmp_path / "files")
    with pytest.raises(infinity.CheckpointError) as caught:
        infinity.load_safetensors(made(tmp_path / "swap", build, dtype="fp32"), tmp_path / "files")
    _, lines = str(caught.value).split("before the optimizer is made:\n")
    (tmp_path / "again").mkdir()
    names = {"infinity": infinity, kind_of.__name__: kind_of, "config": infinity.Config(swap_dirs=tmp_path / "again", dtype="fp32", **SMALL)}
    exec(textwrap.dedent(lines), names)
    infinity.AdamW(names["model"].parameters())
    with infinity.engine_of(names["model"]):
        found = names["model"].state_dict()
        assert found.keys() == plain.state_dict().keys()
        for name, value in plain.state_dict().items():
            assert_same_bits(found[name], value, name)


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("world, chunk_mib", [(1, None), (2, None), (3, 0.05), (8, 0.01)])
def test_a_resharded_checkpoint_holds_the_same_values(tmp_path, world, chunk_mib, dtype):
    model, optimizer = trained(tmp_path / "swap", Odd, dtype=dtype)
    with infinity.engine_of(model) as engine:
        infinity.save(tmp_path / "saved", model, optimizer, extra={"loader": [1, 2]})
        states, buffers = states_of(engine, model), dict(model.named_buffers())
    planned = reshard(tmp_path / "saved", tmp_path / "other", world=world, chunk_mib=chunk_mib, dry_run=True)
    assert not (tmp_path / "other").exists()
    made_ = reshard(tmp_path / "saved", tmp_path / "other", world=world, chunk_mib=chunk_mib)
    assert (made_.world, made_.nbytes) == (world, planned.nbytes)
    with Checkpoint(tmp_path / "other") as checkpoint:
        assert checkpoint.verify() == checkpoint.manifest.nbytes
    again, optimizer = trained(tmp_path / "swap2", Odd, steps=0, dtype=dtype)
    with infinity.engine_of(again) as engine:
        loaded = infinity.load(tmp_path / "other", again, optimizer)
        assert (loaded.step, loaded.extra, loaded.world) == (2, {"loader": [1, 2]}, world)
        assert_same_states(states_of(engine, again), states)
        for name, value in again.named_buffers():
            assert_same_bits(value, buffers[name], name)


def test_resharding_to_the_same_world_size_keeps_all_records(tmp_path):
    model, optimizer = trained(tmp_path / "swap", Odd, dtype="bf16")
    with infinity.engine_of(model):
        infinity.save(tmp_path / "saved", model, optimizer)
    new = reshard(tmp_path / "saved", tmp_path / "other", world=1)
    with Checkpoint(tmp_path / "saved") as checkpoint:
        old = checkpoint.manifest
    assert (new.files, new.tensors, new.parameters) == (old.files, old.tensors, old.parameters)
    assert [list(row) for row in new.places] == [list(row) for row in old.places]
    assert [(c.numel, c.pieces) for c in new.chunks] == [(c.numel, c.pieces) for c in old.chunks]
    for file in old.files:
        assert (tmp_path / "saved" / old.folder / file.name).read_bytes() == (tmp_path / "other" / new.folder / file.name).read_bytes()


def test_export_and_reshard_refuse_bad_input_and_leave_no_files(tmp_path):
    model = made(tmp_path / "swap", lambda: GPT(24, 1, 2, 40, 8), dtype="fp32")
    optimizer = infinity.AdamW(model.parameters())
    with infinity.engine_of(model):
        infinity.save(tmp_path / "saved", model, optimizer)
    for wrong in (lambda: export(tmp_path / "saved", tmp_path / "out", dtype="int8"), lambda: reshard(tmp_path / "saved", tmp_path / "out", world=0)):
        with pytest.raises(infinity.ConfigError, match="expected"):
            wrong()
    with pytest.raises(infinity.CheckpointError, match="is the checkpoint itself"):
        reshard(tmp_path / "saved", tmp_path / "saved", world=2)
    (folder,) = (tmp_path / "saved").glob("data-*")
    victim = folder / "rank0-0.records"
    data = bytearray(victim.read_bytes())
    data[100] ^= 1
    victim.write_bytes(data)
    for wrong in (lambda: export(tmp_path / "saved", tmp_path / "out"), lambda: reshard(tmp_path / "saved", tmp_path / "out", world=2)):
        with pytest.raises(infinity.CheckpointError, match="rank0-0.records: chunk 0 of rank 0 .*weight, is damaged"):
            wrong()
        assert not (tmp_path / "out").exists()
    manifest = json.loads((tmp_path / "saved" / "manifest.json").read_text())
    assert manifest["format"] == "infinity checkpoint"


def test_an_optimizer_state_dict_has_only_hyper_parameters(tmp_path):
    model = made(tmp_path / "swap", lambda: GPT(24, 1, 2, 40, 8), dtype="fp32")
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with infinity.engine_of(model):
        found = optimizer.state_dict()
        assert found["state"] == {} and found["param_groups"][0]["lr"] == 1e-2
        for keep in (lambda: torch.save(found, tmp_path / "file"), lambda: copy.deepcopy(found)):
            with pytest.raises(infinity.UsageError, match="infinity.save"):
                keep()
        found["param_groups"][0]["lr"] = 5e-3
        optimizer.load_state_dict(found)
        model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
        optimizer.step()
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(5e-4)
        with pytest.raises(infinity.UsageError, match="infinity.load"):
            optimizer.load_state_dict({**found, "state": {0: {"step": 1}}})


def test_load_safetensors_refuses_integer_tensors_for_weights(tmp_path):
    model = made(tmp_path / "swap", lambda: nn.Linear(4, 3, bias=False), dtype="fp32")
    write_files(tmp_path / "files", [TensorSpec("weight", torch.int8, (3, 4))], lambda spec: [torch.ones(12, dtype=torch.int8)])
    for strict in (True, False):
        with pytest.raises(infinity.CheckpointError, match="weight is torch.int8 in the files"):
            infinity.load_safetensors(model, tmp_path / "files", strict=strict)
