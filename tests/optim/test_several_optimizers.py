"""Several optimizers on one engine: the bits of one optimizer, skipped steps, refusals, checkpoints and added parameter groups.

Long because all tests share the models with two optimizers and the order of their calls.
"""

import contextlib

import pytest
import torch
from support.helpers import NVME, assert_equals_reference, assert_nothing_held, assert_same_states, on_gpu, plain, states_of
from support.models import gpt_step, inputs, loss_of, mlp, tiny_gpt, tokens
from support.muon import DEVICE, HOST, halves
from support.ranks import gpt as ranks_gpt
from support.ranks import settings as ranks_settings
from support.ranks import states_of as bytes_of
from support.ranks import tokens as ranks_tokens

import infinity
from infinity.errors import CheckpointError, ConfigError, UsageError

pytestmark = pytest.mark.usefixtures("one_thread")


class Both:
    """Two optimizers, each with step() and zero_grad(), called one after the other."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers

    @property
    def accumulation_steps(self):
        return self.optimizers[0].accumulation_steps

    def step(self):
        for each in self.optimizers:
            each.step()

    def zero_grad(self):
        for each in self.optimizers:
            each.zero_grad()


def muon_and_adamw(model, **options):
    matrices, others = halves(model)
    return Both(infinity.Muon(matrices, lr=0.02, **options), infinity.AdamW(others, lr=3e-3, **options))


def one_muon(model, **options):
    return infinity.Muon(model.parameters(), lr=0.02, adamw={"lr": 3e-3}, **options)


def offloaded(make, directory, *, seed=0, **config):
    """(model, engine) without an optimizer."""
    torch.manual_seed(seed)
    model = make()
    directory.mkdir(exist_ok=True)
    config = {"swap_dirs": directory, "device": "cpu", "dtype": "fp32", "chunk_mib": 1 / 512, "host_memory": "64MiB"} | config
    return model, infinity.offload(model, infinity.Config(**config))


def trained(make_optimizer, directory, *, steps=4, options=None, by_layer=False, **config):
    """Losses, and the states of all parameters at the end."""
    model, engine = offloaded(tiny_gpt, directory, **config)
    with engine:
        optimizer, losses = make_optimizer(model, **(options or {})), []
        assert engine.has_started
        for step in range(steps):
            if by_layer:
                losses += infinity.accumulate(model, [tokens(step, i) for i in range(2)], lambda model, batch: model(*batch) / 2)
                optimizer.step()
                optimizer.zero_grad()
            else:
                losses.append(gpt_step(model, optimizer, step, optimizer.accumulation_steps))
        assert_nothing_held(engine)
        return losses, states_of(engine, model)


# ---- the bits of one optimizer ----


@pytest.mark.slow
@pytest.mark.few(5)
@pytest.mark.parametrize("places", [NVME, HOST, DEVICE], ids=["nvme", "host", "device"])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"dtype": "bf16"},
        {"dtype": "fp16"},
        {"options": {"max_grad_norm": 0.5}},
        {"update": "deferred", "dtype": "bf16"},
        {"update": "backward"},
        {"options": {"accumulation_steps": 2}, "dtype": "bf16"},
        {"options": {"accumulation_steps": 2}, "by_layer": True},
    ],
    ids=["fp32", "bf16", "fp16", "clipped", "deferred", "backward", "accumulated", "by-layer"],
)
def test_two_optimizers_have_the_bits_of_one_muon(config, places, tmp_path):
    expected, states = trained(one_muon, tmp_path, **config, **places)
    losses, found = trained(muon_and_adamw, tmp_path, **config, **places)
    assert losses == expected
    assert_same_states(found, states)


@on_gpu
@pytest.mark.parametrize("skips", [False, True])
def test_on_a_gpu_losses_are_those_of_one_optimizer(skips, tmp_path):
    def run(make, **config):
        model, engine = offloaded(lambda: tiny_gpt().cuda(), tmp_path, device="cuda", update="deferred", **config)
        with engine:
            optimizers, losses = make(model), []
            for step in range(20):
                loss = model(*(each.cuda() for each in tokens(step)))
                loss.backward()
                losses.append(loss.item())
                for optimizer in optimizers[: 1 if skips and step % 2 else None]:
                    optimizer.step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
            return losses

    def make_both(model):
        return muon_and_adamw(model).optimizers

    expected = run(make_both if skips else lambda model: [one_muon(model)], **DEVICE)
    for places in (HOST, NVME, DEVICE):
        assert run(make_both, **places) == pytest.approx(expected, abs=1e-4), places


def test_the_norm_is_that_of_all_parameters(tmp_path):
    norms = []
    for make in (one_muon, muon_and_adamw):
        model, engine = offloaded(tiny_gpt, tmp_path)
        with engine:
            optimizer = make(model, max_grad_norm=1.0)
            gpt_step(model, optimizer, 0)
            norms += [each.grad_norm for each in getattr(optimizer, "optimizers", [optimizer])]
    assert norms[0] == norms[1] == norms[2] > 0


@pytest.mark.slow
def test_a_scheduler_between_two_steps_changes_the_next_step_only(tmp_path):
    """The engine makes the step in the second step(), with the values of the first one at its own step()."""

    def make_pair(model):
        return muon_and_adamw(model).optimizers

    def make_one(model):
        return [one_muon(model)]

    def run(make):
        model, engine = offloaded(tiny_gpt, tmp_path, **NVME)
        with engine:
            optimizers = make(model)
            schedulers = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 0.5**step) for each in optimizers]
            for step in range(4):
                model(*tokens(step)).backward()
                for optimizer, scheduler in zip(optimizers, schedulers):
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            return states_of(engine, model)

    assert_same_states(run(make_pair), run(make_one))


@pytest.mark.slow
def test_gradients_of_no_sync_passes_add_up_for_both(tmp_path):
    def run(make):
        model, engine = offloaded(tiny_gpt, tmp_path, **NVME)
        with engine:
            optimizer = make(model, accumulation_steps=2)
            for step in range(3):
                with infinity.no_sync(model):
                    for micro in range(2):
                        model(*tokens(step, micro)).backward()
                model(*tokens(step, 2)).backward()
                optimizer.step()
                optimizer.zero_grad()
            return states_of(engine, model)

    assert_same_states(run(muon_and_adamw), run(one_muon))


@pytest.mark.long
def test_two_ranks_have_the_bits_of_one(worlds, tmp_path):
    expected = train_on_ranks(tmp_path, skips=False)
    assert worlds(2).run(train_on_ranks, tmp_path, skips=False) == [expected, expected]
    expected = train_on_ranks(tmp_path, skips=True)
    assert worlds(2).run(train_on_ranks, tmp_path, skips=True) == [expected, expected]


def train_on_ranks(folder, *, skips):
    """States after four steps of the same data on each rank. skips: AdamW skips the second step."""
    torch.manual_seed(0)
    with infinity.init(ranks_settings(folder, **NVME | {"update": "deferred"})):
        model = ranks_gpt()
    optimizers = muon_and_adamw(model).optimizers
    with infinity.engine_of(model) as engine:
        for step in range(4):
            model(*ranks_tokens(step, 0)).backward()
            for optimizer in optimizers[: 1 if skips and step == 1 else 2]:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        return bytes_of(engine, model)


# ---- skipped steps ----


def two_parts(model):
    """The parameters of the first layers of an mlp, and those of the last two."""
    return [{"params": list(part.parameters())} for part in (model.layers[:2], model.layers[2:])]


def pair(model, kinds=(infinity.AdamW, infinity.AdamW), **options):
    return [kind(group["params"], **({"lr": 1e-2} | options)) for kind, group in zip(kinds, two_parts(model))]


@contextlib.contextmanager
def two_optimizers(directory, *, options=None, **config):
    """Yields (model, engine, first, second): an mlp, its engine, and the optimizers of its halves. Closes the engine."""
    model, engine = offloaded(mlp, directory, **config)
    with engine:
        yield model, engine, *pair(model, **(options or {}))


def update_counts(engine, model):
    """The number of updates of each parameter."""
    engine.flush()
    return [engine.parameter_values.num_updates(param) for param in model.parameters()]


def backward(model, step):
    loss = loss_of(model(inputs(model, step).to(next(model.parameters()).dtype)).float())
    loss.backward()
    return loss


@pytest.mark.slow
@pytest.mark.few(13)
@pytest.mark.parametrize("chunk_mib", [1 / 512, 1], ids=["own chunks", "one chunk for both"])
@pytest.mark.parametrize("order", ["zero_grad before step", "zero_grad after step"])
@pytest.mark.parametrize("places", [NVME, NVME | {"compression": "on"}, HOST, DEVICE], ids=["nvme", "compressed", "host", "device"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_zero_grad_without_step_skips_the_step(dtype, places, order, chunk_mib, tmp_path):
    """Weights, moments and step counts of the skipped parameters stay, as in plain PyTorch without their step()."""
    plain_model, reference = plain(mlp, dtype=dtype, groups=two_parts)
    with two_optimizers(tmp_path, dtype=dtype, chunk_mib=chunk_mib, update="deferred", **places) as (model, engine, first, second):
        for step in range(4):
            backward(model, step)
            backward(plain_model, step)
            if step in (0, 2):
                if order == "zero_grad before step":
                    second.zero_grad()
                    first.step()
                else:
                    first.step()
                    second.zero_grad()
                for param in reference.param_groups[1]["params"]:
                    param.grad = None
            else:
                first.step()
                second.step()
                second.zero_grad()
            first.zero_grad()
            reference.step()
            reference.zero_grad()
        assert_equals_reference(engine, model, plain_model, reference)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_skips_and_added_groups_fit_updates_that_are_announced(dtype, tmp_path):
    """Without room in memory, most updates of a step run in the next forward pass, with the groups of their own step."""

    def run(**places):
        model, engine = offloaded(lambda: mlp(40), tmp_path, dtype=dtype, update="deferred", **places)
        parts = model.layers[:10], model.layers[10:20], model.layers[20:]
        first, middle, last = (list(part.parameters()) for part in parts)
        with engine:
            both = infinity.AdamW(first, lr=1e-2), infinity.AdamW(last, lr=2e-3)
            engine.stats()
            for step in range(6):
                backward(model, step)
                both[step % 2].step()
                if step == 3:
                    both[0].step()
                Both(*both).zero_grad()
                if step == 3:
                    counts.append(sum(chunk.update.is_announced for chunk in engine.registry.chunks))
                    both[0].add_param_group({"params": middle, "lr": 5e-3})
                    assert not any(chunk.update.is_announced for chunk in engine.registry.chunks)
            assert_nothing_held(engine)
            engine.flush()
            numbers = [engine.parameter_values.num_updates(part[0]) for part in (first, middle, last)]
            assert numbers == [4, 1, 3]
            return states_of(engine, model)

    counts = []
    expected = run(**DEVICE)
    assert_same_states(run(**NVME, host_memory=256 << 10, device_memory=24 << 10), expected)
    assert counts[0] == 0 < counts[1]


def test_a_skipped_step_counts_all_gradients_in_the_norm(tmp_path):
    """As if the program had clipped the gradients of all parameters before."""
    plain_model, reference = plain(mlp, groups=two_parts)
    with two_optimizers(tmp_path, **NVME, options={"max_grad_norm": 1e-3}) as (model, engine, first, second):
        backward(model, 0)
        first.step()
        first.zero_grad()
        second.zero_grad()
        backward(plain_model, 0)
        norm = torch.nn.utils.clip_grad_norm_(plain_model.parameters(), 1e-3).item()
        assert first.grad_norm == second.grad_norm == pytest.approx(norm, rel=1e-6)
        assert update_counts(engine, model) == [1] * 4 + [0] * 4
        expected = {param: param.detach().clone() for group in reference.param_groups[1:] for param in group["params"]}
        for name, param in list(plain_model.named_parameters())[4:]:
            assert torch.equal(engine.read_state(model.get_parameter(name))["weight"], expected[param])
        backward(model, 1)  # the gradients of the last step are dropped: both have called zero_grad()


def test_zero_grad_of_all_drops_all_gradients(tmp_path):
    with two_optimizers(tmp_path, update="deferred", **NVME) as (model, engine, first, second):
        before = states_of(engine, model)
        backward(model, 0)
        first.zero_grad()
        second.zero_grad()
        assert all(param.grad is None for param in model.parameters())
        assert_same_states(states_of(engine, model), before)
        backward(model, 1)
        first.step()
        second.step()


def test_zero_grad_from_before_the_backward_pass_skips_nothing(tmp_path):
    with two_optimizers(tmp_path, update="deferred", **NVME) as (model, engine, first, second):
        first.zero_grad()
        backward(model, 0)
        second.step()
        first.step()
        assert update_counts(engine, model) == [1] * 8


def test_a_skip_is_refused_once_updates_have_begun(tmp_path):
    with two_optimizers(tmp_path, update="backward", **NVME) as (model, engine, first, second):
        backward(model, 0)
        first.step()
        with pytest.raises(UsageError, match=r"zero_grad\(\) between a backward pass that has begun to update and its step\(\)"):
            second.zero_grad()
        second.step()
        assert update_counts(engine, model) == [1] * 8


# ---- the order of calls ----


def test_a_pass_between_two_steps_names_the_optimizer_without_step(tmp_path):
    with two_optimizers(tmp_path, update="deferred", **NVME) as (model, engine, first, second):
        backward(model, 0)
        second.step()
        for training in (True, False):
            with torch.set_grad_enabled(training), pytest.raises(UsageError, match=r"step\(\) is missing: AdamW of .*py:\d+.* zero_grad\(\)"):
                model(inputs(model, 1))
        with pytest.raises(UsageError, match="called twice, and step.. is missing: AdamW"):
            second.step()
        with pytest.raises(UsageError, match="after step.. of an optimizer. Do this before the first step"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(UsageError, match="gradients are not saved. Save after step"):
            infinity.save(tmp_path / "saved", model, [first, second])
        first.step()
        first.zero_grad()
        with pytest.raises(UsageError, match=r"param.grad still has the gradients of the last step"):
            backward(model, 1)
        second.zero_grad()
        backward(model, 1)


def test_model_zero_grad_between_two_steps_is_refused_with_a_remedy(tmp_path):
    with two_optimizers(tmp_path, update="deferred", **NVME) as (model, engine, first, second):
        backward(model, 0)
        first.step()
        model.zero_grad()
        with pytest.raises(UsageError, match=r"step.. is missing: AdamW of .* or zero_grad.. of an optimizer that skips this step"):
            second.step()
        second.zero_grad()
        assert update_counts(engine, model) == [1] * 4 + [0] * 4
        first.zero_grad()
        backward(model, 1)


def test_both_step_with_gradients_that_the_program_sets(tmp_path):
    plain_model, reference = plain(mlp, groups=two_parts)
    with two_optimizers(tmp_path, **NVME) as (model, engine, first, second):
        for step in range(2):
            first.zero_grad()
            for each in (model, plain_model):
                for index, param in enumerate(each.parameters()):
                    param.grad = torch.full(param.shape, 0.1 * (index + step))
            second.step()
            first.step()
            second.zero_grad()
            reference.step()
        assert_equals_reference(engine, model, plain_model, reference)


def test_gradients_of_a_part_are_not_dropped_between_two_passes(tmp_path):
    with two_optimizers(tmp_path, **NVME, options={"accumulation_steps": 2}) as (model, engine, first, second):
        backward(model, 0)
        first.zero_grad()
        with pytest.raises(UsageError, match="after zero_grad.. of some optimizers, and the gradients of these are left: AdamW of"):
            backward(model, 1)
        first.zero_grad()
        second.zero_grad()
        backward(model, 1)


def test_step_of_each_without_a_backward_pass_is_refused(tmp_path):
    model, engine = offloaded(mlp, tmp_path, **NVME)
    with engine:
        for optimizer in pair(model):
            with pytest.raises(UsageError, match="without a finished backward pass since the last step"):
                optimizer.step()


def test_a_load_forgets_the_steps_that_were_noted(tmp_path):
    model, engine = offloaded(mlp, tmp_path, update="deferred", **NVME)
    with engine:
        both = pair(model)
        backward(model, 0)
        Both(*both).step()
        Both(*both).zero_grad()
        infinity.save(tmp_path / "saved", model, both)
        expected = states_of(engine, model)
        backward(model, 1)
        both[0].step()
        infinity.load(tmp_path / "saved", model, both)
        assert_same_states(states_of(engine, model), expected)
        backward(model, 1)
        Both(*both).step()


# ---- who joins, and when the engine starts ----


def test_the_engine_starts_with_the_optimizer_that_completes_the_cover(tmp_path):
    model, engine = offloaded(mlp, tmp_path, **NVME)
    with engine:
        first = infinity.AdamW(two_parts(model)[0]["params"])
        assert not engine.has_started and engine.optimizer is first
        second = infinity.Lion(two_parts(model)[1]["params"])
        assert engine.has_started and engine.optimizer == (first, second)
        assert {name: set(state) for name, state in states_of(engine, model).items() if name.endswith("weight")} == {
            f"layers.{i}.weight": {"weight", "momentum", "variance"} if i < 2 else {"weight", "momentum"} for i in range(4)
        }


@pytest.mark.few(2)
@pytest.mark.parametrize("call", ["model", "stats", "describe", "step", "accumulate", "save"])
def test_a_part_of_the_parameters_is_trained_alone(call, tmp_path):
    """The engine starts with the first call that needs it. All other parameters stay."""
    model, engine = offloaded(mlp, tmp_path, update="deferred", **NVME)
    with engine:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer = infinity.AdamW(two_parts(model)[0]["params"], lr=1e-2, accumulation_steps=2)
        assert not engine.has_started
        if call == "step":
            with pytest.raises(UsageError, match="without a finished backward pass"):
                optimizer.step()
        elif call == "accumulate":
            infinity.accumulate(model, [inputs(model, 0)], lambda model, x: loss_of(model(x)))
        elif call == "model":
            backward(model, 0)
        elif call == "describe":
            infinity.describe(model)
        elif call == "save":
            infinity.save(tmp_path / "saved", model, optimizer)
        else:
            engine.stats()
        assert engine.has_started
        if call not in ("model", "accumulate"):
            backward(model, 0)
        optimizer.step()
        optimizer.zero_grad()
        changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
        assert changed == {f"layers.{i}.{name}" for i in range(2) for name in ("weight", "bias")}


def test_an_optimizer_of_torch_over_the_rest_is_refused(tmp_path):
    model, engine = offloaded(mlp, tmp_path, **NVME)
    with engine:
        ours, rest = two_parts(model)
        optimizer = infinity.AdamW(ours["params"])
        other = torch.optim.AdamW(rest["params"])
        with pytest.raises(UsageError, match="torch.optim.AdamW was made over layers.2.weight, which is in an engine"):
            backward(model, 0)
        del other
        backward(model, 0)
        optimizer.step()


def test_a_later_optimizer_needs_the_records_that_were_planned(tmp_path):
    model, engine = offloaded(mlp, tmp_path, update="deferred", **NVME)
    with engine:
        first = infinity.AdamW(two_parts(model)[0]["params"])
        with torch.no_grad():
            model(inputs(model, 0))
        with pytest.raises(UsageError, match=r"has an optimizer already, made at .*py:\d+. .* for which the engine has planned no memory"):
            infinity.Lion(two_parts(model)[1]["params"])
        assert engine.optimizer is first
        second = infinity.AdamW(two_parts(model)[1]["params"])
        assert engine.optimizer == (first, second)


def test_the_loss_scale_stays_when_an_optimizer_joins(tmp_path):
    model, engine = offloaded(mlp, tmp_path, dtype="fp16", **NVME)
    with engine:
        options = {"loss_scale": infinity.LossScale(initial=8.0, interval=2)}
        first = infinity.AdamW(two_parts(model)[0]["params"], **options)
        engine.stats()
        for step in range(3):
            backward(model, step)
            first.step()
            first.zero_grad()
        assert (engine.cycle.scaler.scale, engine.cycle.scaler.num_clean) == (16.0, 1)
        second = infinity.AdamW(two_parts(model)[1]["params"], **options)
        assert (engine.cycle.scaler.scale, engine.cycle.scaler.num_clean) == (16.0, 1)
        backward(model, 3)
        Both(first, second).step()
        assert (engine.cycle.scaler.scale, engine.cycle.scaler.num_clean) == (32.0, 0)


def test_an_optimizer_may_join_after_training_between_two_steps(tmp_path):
    plain_model, reference = plain(mlp, groups=two_parts)
    model, engine = offloaded(mlp, tmp_path, update="deferred", **NVME)
    with engine:
        first = infinity.AdamW(two_parts(model)[0]["params"], lr=1e-2)
        for step in range(3):
            backward(model, step)
            if step == 1:
                with pytest.raises(UsageError, match="between a backward pass and step"):
                    infinity.AdamW(two_parts(model)[1]["params"], lr=1e-2)
            first.step()
            if step == 2:
                second.step()
            engine.optimizers.members[-1].zero_grad()
            first.zero_grad()
            if step == 1:
                second = infinity.AdamW(two_parts(model)[1]["params"], lr=1e-2)
            backward(plain_model, step)
            if step < 2:
                for param in reference.param_groups[1]["params"]:
                    param.grad = None
            reference.step()
            reference.zero_grad()
        assert_equals_reference(engine, model, plain_model, reference)


def test_optimizers_made_again_replace_the_earlier_ones(tmp_path):
    """A notebook cell that runs again makes both optimizers again."""
    model, engine = offloaded(mlp, tmp_path, **NVME)
    with engine:
        before = pair(model)
        first, second = pair(model)
        assert engine.optimizer == (first, second)
        for each in before:
            with pytest.raises(UsageError, match="an optimizer that was replaced by the one of .*py:"):
                each.step()
        only = infinity.AdamW(model.parameters())
        assert engine.optimizer is only
        backward(model, 0)
        only.step()


def test_a_partial_overlap_is_refused_with_a_name_and_a_place(tmp_path):
    with two_optimizers(tmp_path, **NVME) as (model, engine, first, second):
        with pytest.raises(ConfigError, match=r"layers.1.bias is already in the AdamW that was made at .*test_several_optimizers.py:\d+"):
            infinity.AdamW([model.layers[1].bias])
        assert engine.optimizer == (first, second)


@pytest.mark.parametrize(
    "option, values",
    [("max_grad_norm", (1.0, 2.0)), ("accumulation_steps", (1, 2)), ("loss_scale", (None, infinity.LossScale(initial=8.0)))],
)
def test_options_of_all_gradients_must_be_equal(option, values, tmp_path):
    model, engine = offloaded(mlp, tmp_path, dtype="fp16", **NVME)
    with engine:
        first = infinity.AdamW(two_parts(model)[0]["params"], **{option: values[0]})
        with pytest.raises(ConfigError) as caught:
            infinity.AdamW(two_parts(model)[1]["params"], **{option: values[1]})
        for value in values:
            assert f"{option}={value!r} in the AdamW of {__file__}:" in str(caught.value)
        assert engine.optimizer is first and not engine.has_started


# ---- checkpoints ----


def run_and_save(directory, path, *, make=muon_and_adamw, with_optimizer=lambda optimizers: optimizers, save=infinity.save):
    """Losses and states of the last two of four steps, after a checkpoint of the first two."""
    model, engine = offloaded(tiny_gpt, directory, dtype="bf16", **NVME)
    with engine:
        optimizer = make(model)
        for step in range(2):
            gpt_step(model, optimizer, step)
        save(path, model, with_optimizer(optimizer))
        return [gpt_step(model, optimizer, step) for step in (2, 3)], states_of(engine, model)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("saver, loader", [(one_muon, muon_and_adamw), (muon_and_adamw, one_muon)])
def test_a_checkpoint_of_both_is_that_of_one_muon(saver, loader, tmp_path):
    def given(optimizer):
        return getattr(optimizer, "optimizers", optimizer)

    expected, states = run_and_save(tmp_path / "swap", tmp_path / "saved", make=saver, with_optimizer=given)
    model, engine = offloaded(tiny_gpt, tmp_path / "swap", seed=1, dtype="bf16", **NVME)
    with engine:
        optimizer = loader(model)
        infinity.load(tmp_path / "saved", model, given(optimizer))
        assert [gpt_step(model, optimizer, step) for step in (2, 3)] == expected
        assert_same_states(states_of(engine, model), states)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("chunk_mib", [1 / 512, 1 / 64])
def test_a_checkpoint_of_both_resumes_with_the_same_bits(chunk_mib, tmp_path):
    expected, states = run_and_save(tmp_path / "swap", tmp_path / "saved", with_optimizer=lambda both: list(both.optimizers))
    model, engine = offloaded(tiny_gpt, tmp_path / "swap", seed=1, dtype="bf16", chunk_mib=chunk_mib, **NVME)
    with engine:
        both = muon_and_adamw(model)
        for each in both.optimizers:
            each.param_groups[0]["lr"] = 1.0
        infinity.load(tmp_path / "saved", model, both.optimizers[::-1])
        assert [each.param_groups[0]["lr"] for each in both.optimizers] == [0.02, 3e-3]
        assert [gpt_step(model, both, step) for step in (2, 3)] == expected
        assert_same_states(states_of(engine, model), states)


def test_a_dcp_checkpoint_of_both_resumes_with_the_same_bits(tmp_path):
    expected, states = run_and_save(
        tmp_path / "swap", tmp_path / "saved", with_optimizer=lambda both: both.optimizers, save=infinity.save_dcp
    )
    model, engine = offloaded(tiny_gpt, tmp_path / "swap", seed=1, dtype="bf16", chunk_mib=1 / 64, **NVME)
    with engine:
        both = muon_and_adamw(model)
        with pytest.raises(UsageError, match="infinity.load with some of the model's optimizers"):
            infinity.load_dcp(tmp_path / "saved", model, both.optimizers[0], trust_pickle=True)
        infinity.load_dcp(tmp_path / "saved", model, list(both.optimizers), trust_pickle=True)
        assert [gpt_step(model, both, step) for step in (2, 3)] == expected
        assert_same_states(states_of(engine, model), states)


def test_one_of_two_optimizers_is_not_saved_or_loaded_alone(tmp_path):
    with two_optimizers(tmp_path, **NVME) as (model, engine, first, second):
        infinity.save(tmp_path / "saved", model, [second, first])
        for call in (infinity.save, infinity.load):
            for given in (first, [second], (first, first)):
                with pytest.raises(UsageError, match=r"Pass all of them as a list, such as \[adamw, adamw\]. Missing: AdamW of .*py:\d+"):
                    call(tmp_path / "saved", model, given)
            with pytest.raises(UsageError, match="the optimizer is not that of this model"):
                call(tmp_path / "saved", model, [first, second, torch.optim.SGD([torch.zeros(1, requires_grad=True)])])


def test_a_checkpoint_of_other_rules_is_refused(tmp_path):
    model, engine = offloaded(mlp, tmp_path, **NVME)
    with engine:
        infinity.save(tmp_path / "saved", model, pair(model, (infinity.Lion, infinity.AdamW)))
    model, engine = offloaded(mlp, tmp_path, **NVME)
    with engine:
        both = pair(model, (infinity.Lion, lambda params, lr: infinity.SGD(params, lr, momentum=0.9)))
        with pytest.raises(CheckpointError, match="was saved by LionRule, AdamRule, expected LionRule, SGDRule"):
            infinity.load(tmp_path / "saved", model, both)
        infinity.load(tmp_path / "saved", model)  # weights alone


@pytest.mark.filterwarnings("ignore:optimizer.state_dict")
def test_state_dicts_of_both_refer_to_one_checkpoint(tmp_path):
    model, engine = offloaded(mlp, tmp_path, **NVME)
    with engine:
        both = pair(model)
        backward(model, 0)
        Both(*both).step()
        Both(*both).zero_grad()
        infinity.save(tmp_path / "saved", model, both)
        found, expected = [each.state_dict() for each in both], states_of(engine, model)
        assert found[0]["infinity"] == found[1]["infinity"]
        backward(model, 1)
        Both(*both).step()
        assert all("infinity" not in each.state_dict() for each in both)
        both[1].param_groups[0]["lr"] = 0.5
        for each, state_dict in zip(both, found):
            each.load_state_dict(state_dict)
        assert_same_states(states_of(engine, model), expected)
        assert both[1].param_groups[0]["lr"] == 1e-2


# ---- parameter groups that are added ----


@pytest.mark.parametrize("moment", ["before the start", "before training", "after training"])
def test_an_added_group_trains_as_one_of_the_constructor(moment, tmp_path):
    """The second optimizer's groups move by one, and announced updates keep their own."""
    plain_model, reference = plain(mlp, groups=lambda model: [{"params": list(layer.parameters())} for layer in model.layers])
    rates, steps = [1e-2, 2e-2, 1e-2, 1e-2], range(2, 4) if moment == "after training" else range(4)
    for group, rate in zip(reference.param_groups, rates):
        group["lr"] = rate
    model, engine = offloaded(mlp, tmp_path, update="deferred", **NVME)
    layers = [list(layer.parameters()) for layer in model.layers]
    with engine:
        first, second = infinity.AdamW(layers[0], lr=1e-2), infinity.AdamW([*layers[2], *layers[3]], lr=1e-2)
        for step in range(4):
            if step == steps[0]:
                if moment == "before training":
                    engine.stats()
                assert engine.has_started == (moment != "before the start")
                first.add_param_group({"params": layers[1], "lr": 2e-2})
                assert engine.has_started
            backward(model, step)
            Both(first, second).step()
            Both(first, second).zero_grad()
            backward(plain_model, step)
            if step not in steps:
                for param in reference.param_groups[1]["params"]:
                    param.grad = None
            reference.step()
            reference.zero_grad()
        assert_equals_reference(engine, model, plain_model, reference)
        assert [state.group for state in engine.registry.params] == [0, 0, 1, 1, 2, 2, 2, 2]


def test_muon_divides_an_added_group(tmp_path):
    model, engine = offloaded(tiny_gpt, tmp_path, **NVME)
    with engine:
        blocks = [list(block.parameters()) for block in model.blocks]
        others = [param for param in model.parameters() if all(param is not own for block in blocks for own in block)]
        optimizer = infinity.Muon(blocks[0], lr=0.02, adamw={"lr": 3e-3})
        optimizer.add_param_group({"params": blocks[1], "weight_decay": 0.5})
        assert [(group["muon"], group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [
            (True, 0.02, 0.1),
            (False, 3e-3, 1e-2),
            (True, 0.02, 0.5),
            (False, 3e-3, 0.5),
        ]
        infinity.AdamW(others)
        assert engine.has_started


def test_groups_that_do_not_fit_are_refused_and_not_added(tmp_path):
    torch.manual_seed(0)
    model = mlp()
    model.layers[3].requires_grad_(False)
    with infinity.offload(model, infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", update="deferred", **NVME)) as engine:
        layers = [list(layer.parameters()) for layer in model.layers]
        first = infinity.AdamW(layers[0])
        second = infinity.Lion(layers[1])
        engine.stats()
        for optimizer, params, options, kind, message in (
            (first, layers[1], {}, ConfigError, r"layers.1.bias is already in the Lion that was made at .*py:\d+"),
            (first, layers[0], {}, ValueError, "some parameters appear in more than one parameter group"),
            (first, layers[3], {}, UsageError, "layers.3.weight was frozen when the engine started .* Call requires_grad_.. before"),
            (first, layers[2], {"lr": -1.0}, ConfigError, "lr=-1.0: expected 0 or more"),
            (first, [torch.nn.Parameter(torch.ones(2))], {}, ConfigError, "is in no engine"),
            (second, layers[2], {}, UsageError, "planned with momentum, variance by element, .* needs momentum by element"),
        ):
            with pytest.raises(kind, match=message):
                optimizer.add_param_group({"params": params, **options})
            assert len(optimizer.param_groups) == 1
        backward(model, 0)
        with pytest.raises(UsageError, match="a new parameter group, between a backward pass and step"):
            first.add_param_group({"params": layers[2]})
        assert len(first.param_groups) == 1
        Both(first, second).step()
        Both(first, second).zero_grad()
        first.add_param_group({"params": layers[2]})
        backward(model, 1)
        Both(first, second).step()
