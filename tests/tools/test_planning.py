"""`infinity plan`: output, exit status and errors."""

import argparse
import dataclasses
import json
import re
import sys

import pytest
import torch

from infinity import config_files
from infinity.config import Config
from infinity.tools.cli import main
from infinity.tools.machine import DriveRates, Machine
from infinity.tools import meta_models
from infinity.tools.meta_models import gpt
from infinity.tools.predict import largest_model, plan_report, planning
from infinity.tools.predict.largest_model import largest_parameters

NODE = Machine(
    name="a node",
    devices=2,
    device_memory=4 << 30,
    device_tflops=300.0,
    device_update_gparams=60.0,
    host_memory=8 << 30,
    host_gbps=300.0,
    update_gparams=10.0,
    h2d_gbps=25.0,
    d2h_gbps=25.0,
    h2d_all_gbps=20.0,
    d2h_all_gbps=20.0,
    gather_gbps=200.0,
    network_gbps=100.0,
    drives=tuple(DriveRates(read_gbps=6.0, write_gbps=4.0, mixed_gbps=5.0, capacity=20 * 10**9, endurance=7 * 10**15) for _ in range(2)),
)
SMALL = ["--hidden", "512", "--layers", "8", "--vocab", "1000", "--seq", "128", "--set", "chunk_mib=1"]


@pytest.fixture
def node(tmp_path, monkeypatch):
    """A directory with an infinity.toml that describes NODE."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "infinity.toml").write_text(config_files.to_toml({"machine": NODE.to_table()}))
    return tmp_path


def run(capsys, *arguments):
    status = main(["plan", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def report_of(capsys, tmp_path, *arguments):
    status, _, errors = run(capsys, *arguments, "--output", str(tmp_path / "plan.json"))
    assert not errors
    return status, json.loads((tmp_path / "plan.json").read_text())


def test_a_plan_prints_memory_links_step_and_bottleneck(node, capsys):
    status, out, _ = run(capsys, *SMALL, "--set", "param_tier=nvme", "--set", "optimizer_state_tier=nvme", "--set", "residency=none")
    assert status == 0
    for line in ("model ", "machine ", "memory ", "nvme_read", "nvme_write", "step ", "tokens ", "largest ", "wear "):
        assert any(each.startswith(line) for each in out.splitlines()), line
    assert "a node: 2 device(s), 2 drive(s)" in out


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("compression, written", [("off", 12), ("auto", 4 + 8 / 3)])
def test_bytes_per_parameter_of_a_plan_are_those_of_the_design(node, capsys, compression, written):
    """Late moments are written in every third step."""
    on_nvme = [argument for place in ("param_tier=nvme", "optimizer_state_tier=nvme", "residency=none") for argument in ("--set", place)]
    status, report = report_of(capsys, node, *SMALL, *on_nvme, "--set", f"compression={compression}")
    assert status == 0
    links = report["links"]
    assert links["nvme_write"]["bytes_per_parameter"] == pytest.approx(written, rel=0.03 if compression == "off" else 0.05)  # three steps differ
    assert links["nvme_read"]["bytes_per_parameter"] == pytest.approx(14, rel=0.2)
    assert links["d2h"]["bytes_per_parameter"] == pytest.approx(2, rel=0.03)
    assert report["memory"]["nvme"]["needed"] == pytest.approx(12 * report["num_parameters"], rel=0.2)  # and places of gradients
    assert report["step_seconds"] >= report["compute_seconds"]
    per_day = links["nvme_write"]["bytes_per_step"] * 2 / report["step_seconds"] * 86400
    assert report["written_bytes_per_day"] == pytest.approx(per_day)
    assert report["endurance_days"] == pytest.approx(2 * 7e15 / per_day)


@pytest.mark.long
def test_a_plan_counts_and_names_compressed_records(node, capsys):
    on_nvme = [*SMALL, "--set", "param_tier=nvme", "--set", "optimizer_state_tier=nvme", "--set", "residency=none"]
    moved = []
    for choice in ("on", "off"):
        _, out, _ = run(capsys, *on_nvme, "--set", f"compression={choice}", "--output", str(node / "plan.json"))
        report = json.loads((node / "plan.json").read_text())
        assert report["compresses_nvme"] == ("compressed on NVMe" in out) == (choice == "on")
        moved.append([report["links"][link]["bytes_per_step"] for link in ("nvme_read", "nvme_write")])
    read, written = (compressed / whole for compressed, whole in zip(*moved))
    assert 0.8 < read < 0.95  # the residual of 2 bytes is not compressed; hits in host memory vary a little
    assert 0.4 < written < 0.55  # also, moments (8 bytes of 12) are written in every third step


@pytest.mark.slow
def test_a_model_that_fits_needs_no_drive(node, capsys):
    status, report = report_of(capsys, node, *SMALL)
    assert status == 0
    assert report["memory"]["nvme"]["needed"] == 0
    assert report["memory"]["host"]["needed"] <= 2 * report["chunk_bytes"]  # a staging area for gradients, of each rank
    assert report["bottleneck"] in ("compute", "all_gather", "reduce_scatter")
    assert report["endurance_days"] is None


@pytest.mark.long
def test_a_model_that_does_not_fit_names_the_short_tier_with_status_1(node, capsys):
    large = ("--hidden", "2048", "--layers", "400")
    status, out, _ = run(capsys, *large)
    assert status == 1
    assert "does not fit" in out and "nvme" in out and "the largest GPT that fits has about" in out
    status, report = report_of(capsys, node, *large)
    assert status == 1
    assert report["fits"] is False and "nvme" in report["short"]
    assert 1e9 < report["largest_parameters"] < 4e9  # 40 GB of drives and 8 GB of memory, 12 bytes a parameter and gradients


@pytest.mark.long
def test_the_largest_model_fits_and_a_much_larger_one_does_not(node, capsys):
    _, report = report_of(capsys, node, "--params", "20B")
    largest = report["largest_parameters"]
    assert run(capsys, "--params", f"{largest / 1e6:.0f}M")[0] == 0
    assert run(capsys, "--params", f"{1.6 * largest / 1e6:.0f}M")[0] == 1


@pytest.mark.slow
def test_options_override_the_nodes_and_devices_of_the_file(node, capsys):
    _, one = report_of(capsys, node, *SMALL)
    _, more = report_of(capsys, node, *SMALL, "--nodes", "3", "--devices", "4")
    assert (one["world"], more["world"]) == (2, 12)


@pytest.mark.slow
def test_json_and_text_have_the_same_numbers(node, capsys):
    _, out, _ = run(capsys, *SMALL, "--output", str(node / "plan.json"))
    report = json.loads((node / "plan.json").read_text())
    assert f"{report['step_seconds']:.3g} s predicted" in out


@pytest.mark.slow
def test_a_configuration_of_transformers_is_planned(node, capsys):
    pytest.importorskip("transformers")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000}
    (node / "config.json").write_text(json.dumps(config))
    status, report = report_of(capsys, node, "--model", str(node / "config.json"), "--seq", "128")
    assert status == 0
    attention = 256 * 256 * 2 + 256 * 128 * 2
    assert report["num_parameters"] == 2 * 1000 * 256 + 2 * (attention + 3 * 256 * 512 + 2 * 256) + 256


@pytest.mark.slow
def test_adapters_over_a_quantised_base_are_planned(node, capsys):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000, "tie_word_embeddings": False}
    (node / "config.json").write_text(json.dumps(config))
    tiers = ["--set", "param_tier=host", "--set", "optimizer_state_tier=host", "--devices", "1", "--set", "dtype=bf16"]
    found = {}
    for frozen in ("same", "nf4"):
        arguments = ["--model", str(node), "--adapters", "8", "--seq", "128", *tiers, "--set", f"frozen_dtype={frozen}"]
        status, found[frozen] = report_of(capsys, node, *arguments)
        assert status == 0
    layers = 2 * (256 * 256 * 2 + 256 * 128 * 2 + 3 * 256 * 512)
    adapters = 2 * 8 * (2 * (256 + 256) + 2 * (256 + 128) + 3 * (256 + 512))
    assert found["nf4"]["num_parameters"] == 2 * 1000 * 256 + layers + 5 * 256 + adapters
    sent = {frozen: report["links"]["h2d"]["bytes_per_step"] for frozen, report in found.items()}
    assert sent["same"] - sent["nf4"] == pytest.approx(layers * (2 - 0.5625), rel=0.05)  # each weight is sent once a step
    gradients = found["nf4"]["links"]["d2h"]["bytes_per_step"]
    assert gradients == pytest.approx(4 * adapters, rel=0.05)


def test_adapters_of_packed_experts_are_refused(node, capsys):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    transformers.MixtralConfig(**sizes, vocab_size=200, num_local_experts=4, architectures=["MixtralForCausalLM"]).save_pretrained(node)
    status, _, errors = run(capsys, "--model", str(node), "--adapters", "8")
    assert status == 2 and "--adapters: MixtralForCausalLM packs its experts" in errors


def test_adapters_need_a_model_of_transformers(node, capsys):
    status, _, errors = run(capsys, *SMALL, "--adapters", "8")
    assert status == 2 and errors == "infinity: error: --adapters are for a transformers model: name its config.json with --model\n"


_TEXT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 200}
_VISION = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
_SOUND = {"conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
_BOTH = {"text_config": _TEXT | {"model_type": "llama"}, "vision_config": _VISION | {"model_type": "clip_vision_model"}, "image_token_index": 199}
_SOUND |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize(
    "kind, name, sizes",
    [
        ("T5", "T5ForConditionalGeneration", {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 200}),
        ("CLIP", "CLIPModel", {"text_config": _TEXT | {"bos_token_id": 0, "eos_token_id": 2}, "vision_config": _VISION}),
        ("ViT", "ViTForImageClassification", _VISION),
        ("ViT", None, _VISION),  # without a class name: the model without a head
        ("Wav2Vec2", "Wav2Vec2ForCTC", _TEXT | _SOUND),
        ("Llava", "LlavaForConditionalGeneration", _BOTH),
        ("Bert", "BertForMaskedLM", _TEXT),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_models_of_all_kinds_are_planned_as_the_class_of_their_file(kind, name, sizes, node, capsys):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(**sizes, architectures=name and [name])
    config.save_pretrained(node)
    status, report = report_of(capsys, node, "--model", str(node), "--seq", "16", "--batch", "2")
    assert status == 0
    with torch.device("meta"):
        expected = getattr(transformers, name or f"{kind}Model")._from_config(config)
    assert report["num_parameters"] == sum(param.numel() for param in expected.parameters())
    assert report["compute_seconds"] > 0


@pytest.mark.parametrize("most, expected", [(1000, 0), (30, 2)])
def test_a_model_that_is_named_may_have_more_tensors(most, expected, node, capsys, monkeypatch):
    pytest.importorskip("transformers")
    (node / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertForMaskedLM"], **_TEXT}))
    monkeypatch.setattr(meta_models, "MOST_TENSORS", 20)
    monkeypatch.setattr(planning, "MOST_NAMED_TENSORS", most)
    status, _, errors = run(capsys, "--model", str(node / "config.json"), "--seq", "16")
    assert status == expected
    assert ("tensors takes 0 minutes or more" if status == 0 else "a plan may have at most 30 tensors: choose fewer layers") in errors


def test_a_model_that_needs_other_inputs_prints_one_line(node, capsys, monkeypatch):
    pytest.importorskip("transformers")
    (node / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertForMaskedLM"], **_TEXT}))
    monkeypatch.setattr(meta_models, "_inputs", lambda *arguments: {"nonsense": 1})
    status, _, errors = run(capsys, "--model", str(node / "config.json"))
    assert status == 2 and "BertForMaskedLM does not run on nonsense: " in errors and "or give --hidden and --layers" in errors


@pytest.mark.long
def test_the_plot_is_drawn(node, capsys):
    pytest.importorskip("matplotlib")
    status, _, _ = run(capsys, *SMALL, "--plot", str(node / "efficiency.png"))
    assert status == 0
    assert (node / "efficiency.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, says",
    [
        ([], "no model is given"),
        (["--params", "7B", "--hidden", "64"], "--params chooses the sizes"),
        (["--params", "many"], "such as 350M, 7B or 1T"),
        (["--params", "1e30"], "below 10000T"),
        (["--hidden", "100", "--layers", "2", "--heads", "3"], "does not divide"),
        (["--params", "7B", "--machine", "nothing.toml"], "nothing.toml"),
        (["--params", "7B", "--output", "nowhere/plan.json"], "there is no directory"),
        (["--params", "7B", "--set", "host_memry=1GiB"], "did you mean"),
        (["--model", "nothing.json"], "--model: nothing.json does not exist; name the config.json of a transformers model, or its folder"),
    ],
)
def test_mistakes_print_one_line(node, capsys, arguments, says):
    status, _, errors = run(capsys, *arguments)
    assert status == 2
    assert errors.count("\n") == 1 and says in errors


def test_the_error_without_a_machine_names_calibrate_and_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status, _, errors = run(capsys, "--params", "7B")
    assert status == 2
    assert "infinity calibrate" in errors and "--machine FILE" in errors


def test_sizes_of_a_gpt_are_counted_not_estimated():
    subject = gpt(64, 2, 4, 100, 16, 3, "bf16")
    assert sum(param.numel() for param in subject.model.parameters()) == 100 * 64 * 2 + 16 * 64 + 2 * (12 * 64 * 64 + 13 * 64) + 2 * 64
    assert subject.tokens == 48


@pytest.mark.long
def test_a_trillion_parameters_fit_on_one_node_of_eight_devices(tmp_path, capsys):
    status, report = report_of(capsys, tmp_path, "--params", "1T", "--batch", "8", "--machine", "h200x8")
    assert status == 0
    assert report["num_parameters"] == pytest.approx(1e12, rel=0.1)
    assert report["largest_parameters"] > 2e12


def test_an_unknown_rate_is_an_error_before_any_work(node, capsys):
    path = node / "alone.toml"
    path.write_text(config_files.to_toml({"machine": dataclasses.replace(NODE, network_gbps=0.0).to_table()}))
    status, out, errors = run(capsys, *SMALL, "--machine", str(path), "--nodes", "2")
    assert status == 2 and not out
    assert "network_gbps" in errors and len(errors.splitlines()) == 1


@pytest.mark.slow
def test_activations_on_a_cpu_take_host_memory(node, capsys):
    path = node / "cpu.toml"
    path.write_text(config_files.to_toml({"machine": dataclasses.replace(NODE, device="cpu", devices=1).to_table()}))
    assert run(capsys, *SMALL, "--machine", str(path), "--batch", "4")[0] == 0
    status, out, _ = run(capsys, *SMALL, "--machine", str(path), "--batch", "8192")
    assert status == 1 and "for activations" in out


@pytest.mark.long
@pytest.mark.parametrize("device, devices", [("cpu", 1), ("cpu", 2), ("cuda", 1), ("cuda", 2)])
def test_a_model_fits_only_if_all_needed_memory_is_there(node, capsys, device, devices):
    """The printed value decides. A CPU device has no memory of its own: its tensors are in the node's memory."""
    path = node / "tight.toml"
    fits = set()
    for memory in (0.25, 4):
        machine = dataclasses.replace(NODE, device=device, devices=devices, device_memory=1 << 30, host_memory=int(memory * devices * 2**30))
        path.write_text(config_files.to_toml({"machine": machine.to_table()}))
        for batch in ("1", "512"):
            status, report = report_of(capsys, node, *SMALL, "--machine", str(path), "--batch", batch)
            assert status == (0 if report["fits"] else 1)
            fits.add(report["fits"])
            if report["fits"]:
                needs = report["memory"]
                limited = {tier for tier, need in needs.items() if need["there"] is not None}
                assert limited == ({"host", "nvme"} if device == "cpu" else {"device", "host", "nvme"})
                assert all(needs[tier]["needed"] <= needs[tier]["there"] for tier in limited), needs
                most = needs["host" if device == "cpu" else "device"]
                assert 0 < most["activations"] < most["needed"]
    assert fits == {True, False}


@pytest.mark.slow
def test_an_unknown_capacity_is_printed_as_not_known(node, capsys):
    path = node / "unknown.toml"
    drives = tuple(dataclasses.replace(drive, capacity=0) for drive in NODE.drives)
    path.write_text(config_files.to_toml({"machine": dataclasses.replace(NODE, drives=drives).to_table()}))
    status, out, _ = run(capsys, *SMALL, "--machine", str(path), "--output", str(node / "plan.json"))
    assert status == 0 and "unknown" in out
    assert json.loads((node / "plan.json").read_text())["memory"]["nvme"]["there"] is None


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("hidden", ["1600", "100"])
def test_the_default_number_of_heads_divides_any_hidden_size(node, capsys, hidden):
    assert run(capsys, "--hidden", hidden, "--layers", "1", "--vocab", "100", "--seq", "16")[0] == 0


@pytest.mark.parametrize("sizes", [["--hidden", "64"], ["--layers", "2"], ["--heads", "2"], ["--params", "1M"]])
def test_sizes_beside_a_model_of_a_file_are_refused(node, capsys, sizes):
    status, _, errors = run(capsys, "--model", "config.json", *sizes)
    assert status == 2 and sizes[0] in errors


def test_sizes_beyond_all_memory_print_one_line(node, capsys):
    status, _, errors = run(capsys, "--hidden", "99999999872", "--layers", "1")
    assert status == 2 and len(errors.splitlines()) == 1


@pytest.mark.long
def test_the_largest_model_of_very_many_ranks_is_found(node):
    machine = dataclasses.replace(NODE, nodes=2048, host_memory=1 << 40)
    arguments = argparse.Namespace(batch=1, seq=128, vocab=1000, keep_activations=False)
    assert largest_parameters(machine, Config(dtype="bf16"), arguments).parameters > 1e12


@pytest.mark.long
def test_the_largest_model_is_found_in_few_layouts_with_progress(node, capsys, monkeypatch):
    tried, require_room = [], largest_model.require_room

    def count(subject, *rest):
        tried.append(sum(param.numel() for param in subject.model.parameters()))
        return require_room(subject, *rest)

    monkeypatch.setattr(largest_model, "require_room", count)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    status, out, errors = run(capsys, "--params", "9999T", "--machine", "h200x8")
    assert status == 1 and "the largest GPT that fits has about 5 T" in out
    assert 1 <= len(tried) <= 3 and errors.count("the largest GPT that fits: ") == len(tried)
    assert tried[-1] > 4e12


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("params", ["100T", "9999T"])
def test_a_model_beyond_all_tiers_is_refused_by_its_size(node, capsys, params):
    status, out, _ = run(capsys, "--params", params)
    assert status == 1
    assert "weights and states take" in out and "together: add drives or nodes" in out and "the largest GPT that fits has about" in out


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize(
    "arguments, nodes",
    [(("--params", "9999T"), 10**7), (("--hidden", "64", "--layers", "99999999"), 10**7), (("--hidden", "1024", "--layers", "2", "--vocab", "99999999999"), 10**7)],
)
def test_a_model_of_too_many_tensors_is_refused_with_the_limit(node, capsys, monkeypatch, arguments, nodes):
    monkeypatch.setattr("infinity.tools.meta_models.MOST_TENSORS", 1000)
    status, _, errors = run(capsys, *arguments, "--nodes", str(nodes))
    assert status == 2
    assert errors.count("\n") == 1 and "at most 1,000 tensors: choose fewer layers" in errors
    assert run(capsys, *SMALL, "--layers", "2")[0] == 0


@pytest.mark.slow
def test_the_largest_model_within_the_limit_of_tensors_is_a_lower_bound(node, monkeypatch):
    arguments = argparse.Namespace(batch=1, seq=128, vocab=1000, keep_activations=False)
    most = largest_parameters(NODE, Config(dtype="bf16"), arguments)
    assert most.is_most and str(most).startswith("about")
    monkeypatch.setattr("infinity.tools.meta_models.MOST_TENSORS", 200)
    few = largest_parameters(NODE, Config(dtype="bf16"), arguments)
    assert few.parameters < most.parameters and str(few).startswith("at least")


@pytest.mark.long
def test_impossible_activation_sizes_do_not_fit(node, capsys):
    status, out, errors = run(capsys, "--hidden", "100096", "--layers", "1", "--batch", "9999999999", "--nodes", "1000")
    assert status == 1 and not errors
    assert "a tensor of 74.5 TiB is larger than a process can address: lower the batch or the sequence" in out.splitlines()[1]
    status, out, errors = run(capsys, "--hidden", "1024", "--layers", "1", "--batch", "100000")
    needed = re.search(r"need more than ([\d.]+) GiB; a device has 3.9 GiB", out)
    assert status == 1 and not errors and float(needed[1]) > 100 and "lower the batch or the sequence" in out


@pytest.mark.parametrize("share, text", [(0, "0%"), (1e-6, "<1%"), (0.02, "2%"), (1, "100%")])
def test_a_share_that_rounds_to_zero_is_shown_as_below_1_percent(share, text):
    assert plan_report._percent(share) == text
