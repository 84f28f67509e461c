"""Rules: SGD and Lion compute their definitions, users can write rules, and no result depends on the parts of a shard."""

import pytest
import torch
from support.helpers import NVME, assert_same_bits, training
from support.models import gpt_step, tiny_gpt

import infinity
from infinity.formats.format import Format
from infinity.optim.adam import Dither, split_master
from infinity.optim.rules import AdamRule, LionRule, Rule, SGDRule
from infinity.optim.shard import Shard

pytestmark = pytest.mark.usefixtures("one_thread")

RULES = {
    "adamw": (AdamRule(decoupled=True), {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}),
    "adam": (AdamRule(decoupled=False), {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}),
    "sgd": (SGDRule(False), {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.1, "nesterov": False}),
    "momentum": (SGDRule(True), {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1, "nesterov": False}),
    "nesterov": (SGDRule(True), {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": True}),
    "lion": (LionRule(), {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}),
}


def shard(rule, dtype, moments_dtype, numel):
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(numel, generator=generator)
    weight, residual = split_master(master)
    made = {"bf16": {"weight": weight, "residual": residual}, "fp16": {"weight": master.half(), "master": master}}
    made["fp32"] = {"weight": master}
    moments = {name: torch.rand(numel, generator=generator).to(moments_dtype) for name in rule.moments}
    name = "bf16" if moments_dtype is torch.bfloat16 else "fp32"
    return Shard(Format(dtype, moments=rule.moments, moments_dtype=name), made[dtype] | moments)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype, moments", [("bf16", "fp32"), ("bf16", "bf16"), ("fp16", "fp32"), ("fp32", "fp32")])
def test_a_shard_has_the_same_bits_for_all_parts(name, dtype, moments):
    rule, group = RULES[name]
    numel, moments_dtype = 200_003, {"fp32": torch.float32, "bf16": torch.bfloat16}[moments]
    grad_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    whole, cut = (shard(rule, dtype, moments_dtype, numel) for _ in range(2))
    for step in (1, 2, 3):
        grad = torch.randn(numel, generator=torch.Generator().manual_seed(step)).to(grad_dtype)
        grad[step * 7], grad[step * 11] = float("nan"), float("inf")
        scalars = rule.scalars(group, step)
        for segments, borders in ((whole, [0, numel]), (cut, [0, 1024, 5 * 1024, 70 * 1024, numel])):
            for begin, end in zip(borders, borders[1:]):
                dither = Dither.of(0, "w", step, begin) if moments == "bf16" else None
                part = segments.part(begin, end)
                rule.apply(part, grad[begin:end], scalars, 0.5, dither=dither)
    for segment in whole:
        assert_same_bits(cut[segment], whole[segment], segment)
    assert not torch.equal(whole["weight"], shard(rule, dtype, moments_dtype, numel)["weight"])


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.8, "dampening": 0.5}])
def test_sgd_trains_as_torch_optim_does(options, tmp_path):
    options = {"lr": 0.05, "weight_decay": 0.01} | options
    torch.manual_seed(0)
    plain_model = tiny_gpt()
    plain_optimizer = torch.optim.SGD(plain_model.parameters(), **options)
    expected = [gpt_step(plain_model, plain_optimizer, step) for step in range(15)]
    with training(tiny_gpt, tmp_path, optimizer=infinity.SGD, options=options, **NVME) as (model, engine, optimizer):
        got = [gpt_step(model, optimizer, step) for step in range(15)]
        names = {"weight", "momentum"} if options.get("momentum") else {"weight"}
        assert {segment.name for chunk in engine.registry.chunks for segment in chunk.record.segments} == names
    assert got == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_lion_computes_the_update_of_its_paper(tmp_path):
    torch.manual_seed(0)
    plain_model = tiny_gpt()
    momenta = [torch.zeros_like(p) for p in plain_model.parameters()]
    expected = []

    class Plain:
        def step(self):
            with torch.no_grad():
                for p, m in zip(plain_model.parameters(), momenta):
                    update = torch.sign(0.9 * m + (1 - 0.9) * p.grad)
                    p -= 1e-3 * (update + 0.1 * p)
                    m.copy_(0.99 * m + (1 - 0.99) * p.grad)

        def zero_grad(self):
            plain_model.zero_grad()

    expected = [gpt_step(plain_model, Plain(), step) for step in range(15)]
    options = {"lr": 1e-3, "weight_decay": 0.1}
    with training(tiny_gpt, tmp_path, optimizer=infinity.Lion, options=options, **NVME) as (model, engine, optimizer):
        got = [gpt_step(model, optimizer, step) for step in range(15)]
        assert [segment.name for segment in engine.registry.chunks[0].record.segments] == ["weight", "momentum"]
    assert got == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_a_users_rule_is_a_small_class(tmp_path):
    class Adagrad(Rule):
        moments = ("sum",)

        def update(self, p, g, moments, scalars):
            moments["sum"] += g * g
            p -= g / (moments["sum"].sqrt() + 1e-10) * scalars["lr"]

    make = lambda params, lr, **options: infinity.Optimizer(params, Adagrad(), {"lr": lr}, **options)
    torch.manual_seed(0)
    plain_model = tiny_gpt()
    plain_optimizer = torch.optim.Adagrad(plain_model.parameters(), lr=1e-2)
    expected = [gpt_step(plain_model, plain_optimizer, step) for step in range(10)]
    with training(tiny_gpt, tmp_path, optimizer=make, options={"max_grad_norm": 1e9}, **NVME) as (model, engine, optimizer):
        assert [gpt_step(model, optimizer, step) for step in range(10)] == pytest.approx(expected, rel=1e-4)


def test_an_update_that_is_not_elementwise_is_refused(tmp_path):
    class Normalised(Rule):
        def update(self, p, g, moments, scalars):
            p -= g / g.norm() * scalars["lr"]

    class Capped(Rule):
        def update(self, p, g, moments, scalars):
            p -= g / max(1.0, g.abs().max().item()) * scalars["lr"]

    class Voting(Rule):
        def update(self, p, g, moments, scalars):
            p -= g.mean().sign() * scalars["lr"]

    class Sometimes(Rule):
        def update(self, p, g, moments, scalars):
            p -= (g / g.norm() if scalars["normalise"] else g) * scalars["lr"]

    for rule, defaults in ((Normalised, {}), (Capped, {}), (Voting, {}), (Sometimes, {"normalise": 0.0})):
        model = tiny_gpt()
        first, *rest = model.parameters()
        with infinity.offload(model, infinity.Config(swap_dirs=tmp_path, device="cpu")), pytest.raises(ValueError, match="is not elementwise: .* as in Muon, .* as in LAMB"):
            infinity.Optimizer([{"params": rest}, {"params": [first]} | ({"normalise": 1.0} if defaults else {})], rule(), {"lr": 1e-2} | defaults)


def refused(rule, message, directory, **defaults):
    model = tiny_gpt()
    with infinity.offload(model, infinity.Config(swap_dirs=directory, device="cpu")), pytest.raises(infinity.ConfigError, match=message):
        infinity.Optimizer(model.parameters(), rule, {"lr": 1e-2} | defaults)


def test_an_update_that_changes_nothing_in_place_is_refused(tmp_path):
    class Rebinding(Rule):
        def update(self, p, g, moments, scalars):
            p = p - g * scalars["lr"]

    refused(Rebinding(), "Rebinding.update changes neither p nor a moment", tmp_path)


def test_an_unknown_name_in_a_rule_is_reported_and_the_remedy_works(tmp_path):
    class Decaying(Rule):
        def check(self, group):
            return [] if group["lr"] > 0 else ["lr: expected more than 0"]

        def scalars(self, group, step):
            return {**group, "lr": group["lr"] / (1 + group["decay"] * step)}

        def update(self, p, g, moments, scalars):
            moments["speed"] *= 0.5
            moments["speed"] += g
            p -= moments["speed"] * scalars["lr"]

    known = "but the hyper-parameters are lr, the moments none. Give a hyper-parameter among the optimizer's defaults"
    refused(Decaying(), rf"Decaying.scalars asks for 'decay', {known} \({{'decay': ...}}\)", tmp_path)
    refused(Decaying(), r"Decaying.update asks for 'speed', .* or name a moment in Decaying.moments", tmp_path, decay=0.1)
    Decaying.moments = ("speed",)
    make = lambda params, lr, **options: infinity.Optimizer(params, Decaying(), {"lr": lr, "decay": 0.1}, **options)
    with training(tiny_gpt, tmp_path, optimizer=make, **NVME) as (model, engine, optimizer):
        assert gpt_step(model, optimizer, 1) < gpt_step(model, optimizer, 0)  # the losses fall
        del optimizer.param_groups[0]["decay"]
        with pytest.raises(infinity.ConfigError, match=r"has lost its 'decay'; set it again: optimizer.param_groups\[i\]\['decay'\]"):
            optimizer.step()
        optimizer.param_groups[0]["decay"] = 0.1
        gpt_step(model, optimizer, 2)


@pytest.mark.parametrize("member", ["check", "scalars", "update"])
def test_any_other_error_in_a_rule_names_the_rule_and_its_arguments(member, tmp_path):
    def fail(self, *arguments):
        raise IndexError("too far")

    rule = type("Wrong", (Rule,), {member: fail})()
    refused(rule, rf"Wrong.{member} failed with hyper-parameters lr=0.01, of fp32 tensors .*: IndexError: too far. Correct", tmp_path)


@pytest.mark.parametrize(
    "names, message",
    [
        ("sum", "expected a tuple of names"),
        (["sum"], "expected a tuple of names"),
        (("",), "expected a tuple of names"),
        ((1,), "expected a tuple of names"),
        (("a", "a"), "expected different names"),
        (("weight",), "none of weight, residual, master"),
    ],
)
def test_names_of_moments_are_checked(names, message, tmp_path):
    class Named(Rule):
        moments = names

        def update(self, p, g, moments, scalars):
            p -= g

    refused(Named(), message, tmp_path)


def test_each_moment_has_its_own_random_bits():
    class Three(Rule):
        moments = ("a", "b", "c")

        def update(self, p, g, moments, scalars):
            for value in moments.values():
                value += g

    numel = 4096
    segments = shard(Three(), "bf16", torch.bfloat16, numel)
    for name in Three.moments:
        segments[name].fill_(1.0)
    Three().apply(segments, torch.full((numel,), 1 / 512), {}, 1.0, dither=Dither.of(1, "x", 1, 0))
    drawn = [segments[name] > 1 for name in Three.moments]
    for k, one in enumerate(drawn):
        assert 0.2 < one.float().mean() < 0.3  # a change of 1/512 with bf16 steps of 1/128: one in four rounds up
        assert all((one & other).float().mean() < 0.1 for other in drawn[:k])


def test_momentum_of_a_group_matches_torch_optim_or_is_refused(tmp_path):
    refused_message = "momentum=0.9: the records were made without momentum"
    model = tiny_gpt()
    with infinity.offload(model, infinity.Config(swap_dirs=tmp_path, device="cpu")), pytest.raises(infinity.ConfigError, match=refused_message):
        infinity.SGD([{"params": model.parameters(), "momentum": 0.9}], lr=0.1)
    groups = lambda model: [{"params": list(model.parameters())[::2], "momentum": 0.0}, {"params": list(model.parameters())[1::2]}]
    options = {"lr": 0.05, "momentum": 0.9, "dampening": 0.5}
    torch.manual_seed(0)
    plain_model = tiny_gpt()
    plain_optimizer = torch.optim.SGD(groups(plain_model), **options)
    expected = [gpt_step(plain_model, plain_optimizer, step) for step in range(8)]
    with training(tiny_gpt, tmp_path, optimizer=infinity.SGD, groups=groups, options=options) as (model, engine, optimizer):
        assert [gpt_step(model, optimizer, step) for step in range(8)] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "optimizer, wrong, message",
    [
        (infinity.SGD, {"lr": -1.0}, "lr=-1.0: expected 0 or more"),
        (infinity.SGD, {"momentum": -0.1}, "momentum=-0.1: expected 0 or more"),
        (infinity.SGD, {"nesterov": True}, "nesterov=True: expected momentum above 0"),
        (infinity.SGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.5}, "expected momentum above 0 and no dampening"),
        (infinity.SGD, {"dampening": float("nan")}, "dampening=nan: expected a finite number"),
        (infinity.SGD, {"loss_scale": 65536.0}, r"loss_scale=65536.0: expected infinity.LossScale"),
        (infinity.Lion, {"betas": (0.9, 1.0)}, r"betas\[1\]=1.0: expected from 0 to below 1"),
        (infinity.Lion, {"weight_decay": float("nan")}, "weight_decay=nan: expected 0 or more"),
        (infinity.Lion, {"lr": "fast"}, "must be numbers"),
        (infinity.Lion, {"betas": (0.9,)}, r"betas=\(0.9,\): expected two numbers"),
        (infinity.AdamW, {"betas": 0.9}, "betas=0.9: expected two numbers"),
        (infinity.AdamW, {"max_grad_norm": "1.0"}, "max_grad_norm='1.0': expected a number above zero"),
    ],
)
def test_hyper_parameters_out_of_range_are_refused(optimizer, wrong, message, tmp_path):
    with pytest.raises(infinity.ConfigError, match=message):
        with training(tiny_gpt, tmp_path, optimizer=optimizer, options=wrong, **NVME):
            pass
