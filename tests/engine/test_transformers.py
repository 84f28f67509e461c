"""Small models of transformers, with all records on NVMe and less than a quarter of the weights on the device.
Their losses and states are those of plain PyTorch, bit by bit.
"""

import contextlib
import dataclasses
import warnings

import pytest
import torch
from support.helpers import NVME, assert_equals_reference, assert_nothing_held, assert_same_bits
from support.ranks import share, total
from support.transformer_cases import ADAPTED, CASES, OPTIONS, STEPS, loss_of, plain, token_ids, train

import infinity

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")

SHARE = 0.24  # device memory as a share of the weights' bytes
SHARE_OF_TWO = 0.36  # the same for two ranks: each has gradient buffers of two ops on the device


# ---- training them ----

HAS_TILES = "tile_above" in {field.name for field in dataclasses.fields(infinity.Config)}


def settings(folder, weights_nbytes, share=SHARE, **changes):
    """All records on NVMe, no resident weights, device memory for a share of the weights."""
    tiles = {"tile_above": None} if HAS_TILES else {}  # the layers are small enough without tiles
    options = {"device": "cpu", "dtype": "fp32", "chunk_mib": 1 / 128, "host_memory": "32MiB"}
    budget = int(share * weights_nbytes)
    return infinity.Config(swap_dirs=folder, device_memory=budget, **options | NVME | tiles | changes)


def nbytes_of(model):
    return sum(param.numel() * 4 for param in model.parameters())


@contextlib.contextmanager
def offloaded(build, folder, *, options=OPTIONS, **changes):
    """(model, engine, optimizer). The model is built with seed 0 inside infinity.init, in a window of a quarter of the weights' bytes."""
    torch.manual_seed(0)
    weights_nbytes = nbytes_of(build())
    torch.manual_seed(0)
    with infinity.init(settings(folder, weights_nbytes, **changes), window=weights_nbytes // 4):
        model = build()
    optimizer = infinity.AdamW([param for param in model.parameters() if param.requires_grad], **options)
    with infinity.engine_of(model) as engine:
        yield model, engine, optimizer
        assert_nothing_held(engine)


@torch.no_grad()
def evaluate(model, batch):
    model.eval()
    loss = loss_of(model, batch, 99).item()
    model.train()
    return loss


def assert_within_budget(engine, model):
    stats = engine.stats()
    weights_nbytes = 4 * stats["num_parameters"]
    assert stats["num_parameters"] == sum(param.numel() for param in model.parameters())
    assert stats["peak_device_nbytes"] <= stats["device_budget_nbytes"] < weights_nbytes / 4
    assert stats["num_chunks_on_device"] == 0
    return stats


# ---- equality with plain PyTorch ----

TABLE = []


@pytest.fixture(scope="module", autouse=True)
def table(request):
    """Print one line per model after the tests of this file."""
    yield
    if not TABLE:
        return
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n\n{'model':28}{'parameters':>11}{'state bytes':>13}{'budget':>8}{'peak':>7}   loss difference")
        for name, stats, difference in TABLE:
            weights_nbytes = 4 * stats["num_parameters"]
            budget, peak = (stats[key] / weights_nbytes for key in ("device_budget_nbytes", "peak_device_nbytes"))
            sizes = f"{stats['num_parameters']:11,}{stats['model_state_nbytes']:13,}{budget:8.1%}{peak:7.1%}"
            print(f"{name:28}{sizes}   {difference:.1e} to torch.optim.AdamW, 0 to the same arithmetic")


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("name", CASES)
def test_losses_and_states_are_those_of_plain_pytorch(name, tmp_path):
    """Losses equal torch.optim.AdamW within a relative error of 1e-5, and the engine's documented arithmetic bit by bit."""
    case = CASES[name]
    expected = train(*plain(case.build, torch.optim.AdamW), case.batch)
    reference_model, reference = plain(case.build)
    same = train(reference_model, reference, case.batch)
    with offloaded(case.build, tmp_path) as (model, engine, optimizer):
        losses = train(model, optimizer, case.batch)
        assert losses == same
        assert losses == pytest.approx(expected, rel=1e-5)
        assert evaluate(model, case.batch) == evaluate(reference_model, case.batch)
        assert_equals_reference(engine, model, reference_model, reference)
        buffers = dict(reference_model.named_buffers())
        for key, buffer in model.named_buffers():
            assert torch.equal(buffer, buffers[key]), key
        stats = assert_within_budget(engine, model)
    TABLE.append((name, stats, max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))))


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", ["GPT-2", "Llama", "T5"])
def test_gradient_checkpointing_changes_no_bit(name, use_reentrant, tmp_path):
    case = CASES[name]

    def build():
        model = case.build()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # transformers renames the option
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        return model

    reference_model, reference = plain(build)
    with offloaded(build, tmp_path) as (model, engine, optimizer):
        assert train(model, optimizer, case.batch) == train(reference_model, reference, case.batch)
        assert_equals_reference(engine, model, reference_model, reference)
        assert_within_budget(engine, model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPT-2", "T5"])
def test_generated_tokens_are_those_of_the_plain_model(name, tmp_path):
    case = CASES[name]
    reference_model, reference = plain(case.build)
    with offloaded(case.build, tmp_path) as (model, engine, optimizer):
        found = []
        for each, optimizer_ in ((model, optimizer), (reference_model, reference)):
            train(each, optimizer_, case.batch)
            each.eval()
            prompt = token_ids(torch.Generator().manual_seed(7))
            with torch.no_grad():
                tokens = each.generate(input_ids=prompt, max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0)
            each.train()
            found.append((tokens.tolist(), train(each, optimizer_, case.batch, first=STEPS, steps=1)))
        assert found[0] == found[1]
        assert len(found[0][0][0]) >= 12
        assert_within_budget(engine, model)


# ---- low-rank adapters ----


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_train_on_a_frozen_model_that_is_never_written(name, tmp_path):
    peft = pytest.importorskip("peft")
    case = CASES[name]

    def build():
        options = {"target_modules": ADAPTED[name], "fan_in_fan_out": name == "GPT-2", "task_type": "CAUSAL_LM"}
        return peft.get_peft_model(case.build(), peft.LoraConfig(r=4, lora_alpha=8, **options))

    reference_model, reference = plain(build)
    initial = {key: param.detach().clone() for key, param in reference_model.named_parameters()}
    with offloaded(build, tmp_path) as (model, engine, optimizer):
        trained = [chunk for chunk in engine.registry.chunks if chunk.trainable]
        assert 0 < len(trained) < len(engine.registry.chunks) / 4
        before = engine.stats()["nvme_write_nbytes"]
        for step in range(STEPS):
            assert train(model, optimizer, case.batch, step, 1) == train(reference_model, reference, case.batch, step, 1)
            engine.flush()
            written = engine.stats()["nvme_write_nbytes"]
            assert written - before == sum(chunk.record.nbytes for chunk in trained)
            before = written
        for key, param in model.named_parameters():
            state = engine.read_state(param)
            assert ("momentum" in state) == param.requires_grad == ("lora_" in key), key
            if not param.requires_grad:
                assert set(state) == {"weight"}
                assert_same_bits(state["weight"], initial[key], key)
        assert_equals_reference(engine, model, reference_model, reference)
        assert_within_budget(engine, model)


# ---- two ranks ----


def train_share(name, folder):
    """Runs on every rank: trains on the rank's rows of each batch. Returns losses over all ranks and the number of plans."""
    case = CASES[name]
    with offloaded(case.build, folder, share=SHARE_OF_TWO) as (model, engine, optimizer):
        losses = []
        for step in range(STEPS):
            loss = loss_of(model, case.batch, step, share)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total(loss.item()))
        return losses, engine.stats()["num_prefetch_plans"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["GPT-2", "Mixtral", "T5"])
def test_two_ranks_have_the_losses_of_one_process_on_the_whole_batch(name, two_ranks, tmp_path):
    expected = train(*plain(CASES[name].build), CASES[name].batch)
    for losses, num_plans in two_ranks.run(train_share, name, tmp_path):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert num_plans >= 1
