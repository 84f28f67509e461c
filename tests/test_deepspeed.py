import copy
import json
import pickle
import random

import pytest
import torch

import infinity
from infinity.config import Config
from infinity.errors import ConfigError
from infinity.integrations.deepspeed import convert
from infinity.integrations.deepspeed_keys import UNMATCHED, UNNEEDED

STAGE_3 = {"zero_optimization": {"stage": 3}}
LISTS = ("mapped", "to_optimizer", "unneeded", "unmatched")

# The settings in tutorials of ZeRO-Infinity and of Hugging Face's integration.
INFINITY = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 1.0,
    "steps_per_print": 10,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
    "zero_optimization": {
        "stage": 3,
        "offload_param": {
            "device": "nvme", "nvme_path": "one", "pin_memory": True, "buffer_count": 6, "buffer_size": 1e8, "max_in_cpu": 1e9
        },
        "offload_optimizer": {
            "device": "nvme", "nvme_path": "two", "pipeline_read": True, "pipeline_write": True, "fast_init": False, "ratio": 1.0
        },
        "stage3_prefetch_bucket_size": 5e7,
        "stage3_param_persistence_threshold": 1e5,
        "sub_group_size": 1e9,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 5e8,
        "allgather_bucket_size": 5e8,
        "zero_hpz_partition_size": 8,
        "zero_quantized_weights": False,
        "zero_quantized_gradients": True,
    },
    "activation_checkpointing": {"cpu_checkpointing": True, "partition_activations": False},
    "aio": {"block_size": 1048576, "queue_depth": 8, "use_gds": False},
    "wall_clock_breakdown": False,
}  # fmt: skip
HUGGING_FACE = {
    "fp16": {
        "enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "reduce_bucket_size": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}  # fmt: skip


def with_stage_3(**tables):
    return copy.deepcopy(STAGE_3 | tables)


def with_zero(**settings):
    return {"zero_optimization": {"stage": 3} | settings}


def with_fp16(**settings):
    return with_stage_3(fp16={"enabled": True} | settings)


def with_adam(**params):
    return with_stage_3(optimizer={"type": "Adam", "params": params})


def keys_of(table, prefix=""):
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from keys_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def list_of(conversion, key):
    (found,) = [name for name in LISTS if key in getattr(conversion, name)]
    return found


@pytest.fixture(autouse=True)
def directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    return tmp_path


# The conversion


def test_a_configuration_of_zero_infinity_is_converted():
    config = Config.from_deepspeed(INFINITY)
    assert config == Config(swap_dirs=["one", "two"], param_tier="nvme", optimizer_state_tier="nvme", activation_tier="host", dtype="bf16", nonfinite="skip")
    conversion = config.conversion
    assert conversion.arguments == {
        "lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "max_grad_norm": 1.0, "accumulation_steps": 8
    }  # fmt: skip
    assert (conversion.optimizer, conversion.loss_scale) == ("AdamW", {})
    assert conversion.optimizer_call == (
        "infinity.AdamW(model.parameters(), lr=0.0003, betas=(0.9, 0.95), eps=1e-08, weight_decay=0.1, "
        "max_grad_norm=1.0, accumulation_steps=8)"
    )
    assert conversion.mapped == {
        "zero_optimization.offload_param.device": "param_tier = nvme",
        "zero_optimization.offload_param.nvme_path": "swap_dirs = one",
        "zero_optimization.offload_optimizer.device": "optimizer_state_tier = nvme",
        "zero_optimization.offload_optimizer.nvme_path": "swap_dirs = two",
        "bf16.enabled": "dtype = bf16",
        "activation_checkpointing.cpu_checkpointing": "activation_tier = host",
    }
    assert sorted(conversion.unmatched) == [
        "scheduler.params.warmup_num_steps",
        "scheduler.type",
        "steps_per_print",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "zero_optimization.zero_hpz_partition_size",
        "zero_optimization.zero_quantized_gradients",
    ]


def test_auto_counts_as_not_set():
    conversion = convert(HUGGING_FACE)
    assert conversion.config == {"param_tier": "host", "optimizer_state_tier": "host"}
    assert conversion.arguments == {"weight_decay": 0.0}
    assert conversion.loss_scale == {}
    assert {key for key, why in conversion.unneeded.items() if why.startswith("auto: the trainer's arguments")} == {
        key for key in keys_of(HUGGING_FACE) if key.rpartition(".")[2] in
        ("enabled", "lr", "betas", "eps", "weight_decay", "warmup_min_lr", "reduce_bucket_size", "gradient_accumulation_steps",
         "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu")
    }  # fmt: skip


@pytest.mark.parametrize(
    "tables, config",
    [
        ({}, {"dtype": "fp32"}),
        ({"fp16": {"enabled": True}}, {"dtype": "fp16"}),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": False}}, {"dtype": "fp32"}),
        ({"fp16": {"enabled": "auto"}}, {}),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": "auto"}}, {}),
        ({"bf16": {"enabled": True}}, {"dtype": "bf16", "nonfinite": "skip"}),
        ({"bfloat16": {"enabled": True}}, {"dtype": "bf16", "nonfinite": "skip"}),
        ({"bf16": {"enabled": True, "check_grad_overflow": False}}, {"dtype": "bf16", "nonfinite": "ignore"}),
        ({"bf16": {"enabled": True, "check_grad_overflow": "auto"}}, {"dtype": "bf16", "nonfinite": "skip"}),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, {"dtype": "bf16", "optimizer_state_dtype": "bf16", "nonfinite": "skip"}),
        ({"bf16": {"enabled": False, "bf16_optimizer_states": True}}, {"dtype": "fp32"}),
        ({"activation_checkpointing": {"cpu_checkpointing": False}}, {"dtype": "fp32"}),
        (
            with_zero(offload_param={"device": "none"}, offload_optimizer={"device": "cpu"}),
            {"param_tier": "device", "optimizer_state_tier": "host", "dtype": "fp32"},
        ),
        (with_zero(offload_param={"device": "cpu", "nvme_path": "one"}), {"param_tier": "host", "dtype": "fp32"}),
        (
            with_zero(offload_param={"device": "nvme", "nvme_path": "one"}, offload_optimizer={"device": "nvme", "nvme_path": "one"}),
            {"param_tier": "nvme", "optimizer_state_tier": "nvme", "swap_dirs": ["one"], "dtype": "fp32"},
        ),
        (with_zero(offload_param=None, offload_optimizer={"device": None}), {"dtype": "fp32"}),
    ],
)
def test_a_setting_is_converted_to_a_field(tables, config):
    conversion = convert(with_stage_3(**tables))
    assert conversion.config == config
    Config(**config)


@pytest.mark.parametrize(
    "optimizer, call",
    [
        ({"type": "AdamW"}, "infinity.AdamW(model.parameters(), weight_decay=0.0)"),
        ({"type": "Adam", "params": {"lr": 1e-3}}, "infinity.AdamW(model.parameters(), lr=0.001, weight_decay=0.0)"),
        ({"type": "Adam", "params": {"adam_w_mode": True}}, "infinity.AdamW(model.parameters(), weight_decay=0.0)"),
        ({"type": "adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}, "infinity.Adam(model.parameters(), weight_decay=0.1)"),
        ({"type": "SGD", "params": {"lr": 1, "momentum": 0.9, "eps": 1}}, "infinity.SGD(model.parameters(), lr=1, momentum=0.9)"),
        ({"type": "Lion"}, "infinity.Lion(model.parameters(), lr=0.001)"),
        ({"type": "Lamb", "params": {"lr": 1}}, "infinity.OPTIMIZER(model.parameters())"),
    ],
)
def test_an_optimizer_is_converted_to_a_call_of_its_class(optimizer, call):
    assert convert(with_stage_3(optimizer=optimizer)).optimizer_call == call


@pytest.mark.parametrize("optimizer", ["AdamW", "Adam", "SGD", "Lion"])
def test_the_optimizers_and_their_arguments_exist(optimizer):
    params = {"adam_w_mode": False, "lr": 0.01, "weight_decay": 0.1, "betas": [0.8, 0.9], "momentum": 0.5, "eps": 1e-7}
    source = with_stage_3(optimizer={"type": optimizer, "params": params}, gradient_clipping=2, gradient_accumulation_steps=3)
    conversion = convert(source | {"fp16": {"enabled": True, "min_loss_scale": 4, "initial_scale_power": 10}})
    model = torch.nn.Linear(4, 4)
    with infinity.offload(model, Config(device="cpu", dtype="fp16")):
        made = eval(conversion.optimizer_call, {"infinity": infinity, "model": model})
    assert type(made) is getattr(infinity, optimizer)
    assert {name: made.param_groups[0][name] for name in ("lr", "weight_decay")} == {"lr": 0.01, "weight_decay": 0.1}
    assert (made.max_grad_norm, made.accumulation_steps) == (2, 3)
    assert made.loss_scale == infinity.LossScale(initial=1024, minimum=4, interval=1000)


@pytest.mark.parametrize(
    "fp16, loss_scale",
    [
        ({"enabled": True}, {"interval": 1000}),
        ({"enabled": True, "loss_scale": 0, "loss_scale_window": 500}, {"interval": 500}),
        ({"enabled": True, "initial_scale_power": 12, "min_loss_scale": 2}, {"initial": 4096.0, "minimum": 2.0, "interval": 1000}),
        ({"enabled": True, "loss_scale": 0.5, "loss_scale_window": 7}, {"initial": 0.5, "growth": 1.0, "backoff": 1.0, "minimum": 0.5}),
        ({"enabled": False, "loss_scale": 128}, {}),
        ({"loss_scale": 128, "loss_scale_window": 7}, {}),
    ],
)
def test_a_loss_scale_has_the_start_and_interval_of_deepspeed(fp16, loss_scale):
    conversion = convert(with_stage_3(fp16=fp16))
    assert conversion.loss_scale == loss_scale
    infinity.LossScale(**loss_scale)
    assert ("loss_scale" in conversion.optimizer_call) == bool(loss_scale)


@pytest.mark.parametrize(
    "fp16, is_implied",
    [
        ({"enabled": True}, True),
        ({"enabled": True, "hysteresis": "auto"}, True),
        ({"enabled": True, "hysteresis": 2}, False),  # hysteresis is set: a list has the key
        ({"enabled": True, "loss_scale": 8}, False),
        ({"enabled": False}, False),
    ],
)
def test_unset_hysteresis_is_a_different_default_of_a_dynamic_loss_scale(fp16, is_implied):
    assert any("fp16.hysteresis" in why for why in convert(with_stage_3(fp16=fp16)).implied.values()) == is_implied


def test_values_of_unused_settings_are_not_checked():
    lamb = {"type": "Lamb", "params": {"lr": "1e-4", "betas": 3}}
    for fp16 in ({"loss_scale_window": 0, "min_loss_scale": 0}, {"enabled": True, "loss_scale": 8, "min_loss_scale": 0}):
        convert(with_stage_3(fp16=fp16, optimizer=lamb))


# The lists


@pytest.mark.parametrize("source", [INFINITY, HUGGING_FACE], ids=["infinity", "hugging face"])
def test_every_key_is_in_exactly_one_list(source):
    conversion = convert(source)
    assert sorted(key for name in LISTS for key in getattr(conversion, name)) == sorted(keys_of(source))


@pytest.mark.slow
def test_every_key_of_any_configuration_is_in_exactly_one_list():
    draw = random.Random(0)
    names = "stage enabled device nvme_path params params.lr type betas check_grad_overflow zzz x.y.z loss_scale".split()
    tables = "fp16 bf16 bfloat16 optimizer optimizer.params zero_optimization.offload_param tensorboard what".split()
    known = [rule + draw.choice(names) if rule.endswith(".") else rule for rule in (*UNNEEDED, *UNMATCHED)]
    known += [f"{table}.{name}" for table in tables for name in names]
    values = [True, False, 0, 1, 2.5, None, "auto", "nvme", "AdamW", [], [1, {}], {}]
    converted = 0
    for _ in range(3000):
        source = with_stage_3()
        for key in draw.sample(known, draw.randrange(12)):
            table, (*path, last) = source, key.split(".")
            for name in path:
                inner = table.setdefault(name, {})
                table = inner if isinstance(inner, dict) else {}  # the key is left out if a value is in its way
            table.setdefault(last, copy.deepcopy(draw.choice(values)))
        try:
            conversion = convert(source)
        except ConfigError as error:
            assert "expected" in str(error) and "\n" not in str(error)
            continue
        converted += 1
        assert sorted(key for name in LISTS for key in getattr(conversion, name)) == sorted(keys_of(source))
        assert str(conversion).count("\n") > len(list(keys_of(source)))
    assert converted > 500


@pytest.mark.parametrize(
    "tables, key, expected",
    [
        (with_zero(zero_hpz_partition_size=1), "zero_optimization.zero_hpz_partition_size", "unneeded"),
        (with_zero(zero_hpz_partition_size=8), "zero_optimization.zero_hpz_partition_size", "unmatched"),
        (with_zero(offload_optimizer={"ratio": 0.3}), "zero_optimization.offload_optimizer.ratio", "unmatched"),
        (with_zero(offload_param={"pin_memory": False}), "zero_optimization.offload_param.pin_memory", "unmatched"),
        (with_zero(offload_param={"nvme_path": "/x"}), "zero_optimization.offload_param.nvme_path", "unneeded"),
        (with_zero(cpu_offload=True), "zero_optimization.cpu_offload", "unmatched"),
        ({"aio": {"block_size": 5}}, "aio.block_size", "unneeded"),
        ({"aio": {"use_gds": True}}, "aio.use_gds", "unmatched"),
        ({"fp16": {"hysteresis": 2, "enabled": True}}, "fp16.hysteresis", "unmatched"),
        ({"fp16": {"hysteresis": 1, "enabled": True}}, "fp16.hysteresis", "unneeded"),
        ({"fp16": {"hysteresis": 2, "enabled": False}}, "fp16.hysteresis", "unneeded"),
        ({"tensorboard": {"enabled": False, "output_path": "x"}}, "tensorboard.output_path", "unneeded"),
        ({"tensorboard": {"enabled": True, "output_path": "x"}}, "tensorboard.output_path", "unmatched"),
        ({"gradient_clipping": 0.0}, "gradient_clipping", "unneeded"),
        ({"gradient_clipping": 0.5}, "gradient_clipping", "to_optimizer"),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, "data_types.grad_accum_dtype", "unneeded"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype", "unmatched"),
        ({"optimizer": {"type": "OneBitAdam", "params": {"lr": 1}}}, "optimizer.params.lr", "unmatched"),
        ({"optimizer": {"type": "Lion", "params": {"adam_w_mode": True}}}, "optimizer.params.adam_w_mode", "unmatched"),
        ({"scheduler": {}}, "scheduler", "unneeded"),
        ({"elasticity": None}, "elasticity", "unneeded"),
    ],
)
def test_the_list_depends_on_the_value(tables, key, expected):
    assert list_of(convert(with_stage_3(**tables)), key) == expected


def test_an_unknown_key_is_in_the_list_without_counterpart():
    assert convert(with_stage_3(zzz=1)).unmatched == {"zzz": "infinity does not know this setting"}


@pytest.mark.parametrize(
    "source, expected",
    [
        ({"reduce_buckt_size": 1}, "zero_optimization.reduce_buckt_size: DeepSpeed has no such setting; did you mean 'reduce_bucket_size'?"),
        ({"ofload_param": {"device": "cpu"}}, "zero_optimization.ofload_param: DeepSpeed has no such setting; did you mean 'offload_param'?"),
        ({"offload_param": {"devise": "cpu"}}, "zero_optimization.offload_param.devise: DeepSpeed has no such setting; did you mean 'device'?"),
    ],
)
def test_a_key_spelled_like_a_known_one_is_refused(source, expected):
    with pytest.raises(ConfigError) as raised:
        convert(with_zero(**source))
    assert str(raised.value) == expected
    with pytest.raises(ConfigError, match="^gradient_cliping: .* did you mean 'gradient_clipping'"):
        convert(with_stage_3(gradient_cliping=1))


def test_a_conversion_prints_as_lists():
    source = with_zero(offload_param={"device": "cpu"}, sub_group_size=1) | {"gradient_clipping": 1, "steps_per_print": 5}
    assert str(convert(source)) == "\n".join(
        [
            "Mapped",
            "  zero_optimization.offload_param.device  param_tier = host",
            "",
            "For the optimizer",
            "  gradient_clipping                       max_grad_norm = 1.0",
            "",
            "Nothing to do",
            "  zero_optimization.stage                 weights, gradients and states are always sliced over all ranks",
            "  zero_optimization.sub_group_size        the optimizer updates one chunk at a time",
            "",
            "No counterpart",
            "  steps_per_print                         the engine prints and sends no reports: call engine.stats()",
            "",
            "Not set, with different defaults",
            "  dtype = fp32                            neither fp16 nor bf16 is enabled",
            "",
            "The optimizer",
            "  infinity.OPTIMIZER(model.parameters(), max_grad_norm=1.0)",
        ]
    )


# Mistakes


@pytest.mark.parametrize(
    "source, expected",
    [
        ({}, "zero_optimization.stage is not set, and the default is 0: expected 3."),
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage=2: expected 3. Only ZeRO-3 slices weights, gradients and states"),
        ({"zero_optimization": {"stage": "3"}}, "zero_optimization.stage='3': expected 3."),
        ({"zero_optimization": {"stage": "auto"}}, "zero_optimization.stage is not set"),
        ({"zero_optimization": True}, "zero_optimization.stage is not set"),
        (with_stage_3(fp16=True), "fp16=True: expected a table"),
        (with_stage_3(aio=5), "aio=5: expected a table"),
        (with_stage_3(optimizer={"params": [1]}), "optimizer.params=[1]: expected a table"),
        (with_stage_3(optimizer={"type": 5}), "optimizer.type=5: expected the name of an optimizer"),
        (with_stage_3(fp16={"enabled": 1}), "fp16.enabled=1: expected true or false"),
        (with_stage_3(fp16={"enabled": True}, bf16={"enabled": True}), "fp16.enabled and bf16.enabled: expected one of them"),
        (with_stage_3(fp16={"initial_scale_power": 5000}), "fp16.initial_scale_power=5000: expected a number from 0 to 127"),
        (with_stage_3(fp16={"loss_scale": -1}), "fp16.loss_scale=-1: expected a number, zero or above"),
        (with_stage_3(fp16={"loss_scale": 10**400}), "fp16.loss_scale=1000"),
        (with_fp16(loss_scale_window=0), "fp16.loss_scale_window=0: expected a whole number above zero"),
        (with_fp16(loss_scale_window=1.5), "fp16.loss_scale_window=1.5: expected a whole number above zero"),
        (with_fp16(min_loss_scale=0), "fp16.min_loss_scale=0: expected a number above zero"),
        (
            with_fp16(min_loss_scale=4, initial_scale_power=0),
            "fp16.min_loss_scale=4: expected at most 1, the initial scale; raise fp16.initial_scale_power or lower fp16.min_loss_scale",
        ),
        (with_fp16(min_loss_scale=1e5), "fp16.min_loss_scale=100000.0: expected at most 65536, the initial scale"),
        (with_adam(lr="1e-4"), "optimizer.params.lr='1e-4': expected a number, zero or above"),
        (with_adam(betas=3), "optimizer.params.betas=3: expected two numbers from 0 to below 1"),
        (with_adam(betas=[0.9]), "optimizer.params.betas=[0.9]: expected two numbers"),
        (with_adam(betas=[0.9, 1]), "optimizer.params.betas=[0.9, 1]: expected two numbers"),
        (with_adam(eps=-1), "optimizer.params.eps=-1: expected a number, zero or above"),
        (with_adam(weight_decay=True), "optimizer.params.weight_decay=True: expected a number, zero or above"),
        (
            with_stage_3(optimizer={"type": "SGD", "params": {"nesterov": True}}),
            "optimizer.params.nesterov=True: expected optimizer.params.momentum above zero, and no dampening",
        ),
        (with_stage_3(gradient_clipping="1"), "gradient_clipping='1': expected a number, zero or above"),
        (with_stage_3(gradient_clipping=float("nan")), "gradient_clipping=nan: expected a number"),
        (with_stage_3(gradient_accumulation_steps=0), "gradient_accumulation_steps=0: expected a whole number above zero"),
        (with_zero(offload_param={"device": "disk"}), "zero_optimization.offload_param.device='disk': expected one of none, cpu, nvme"),
        (with_zero(offload_param={"device": ["cpu"]}), "zero_optimization.offload_param.device=['cpu']: expected one of"),
        (with_zero(offload_optimizer={"nvme_path": 5}), "zero_optimization.offload_optimizer.nvme_path=5: expected a directory"),
    ],
)
def test_the_error_of_a_mistake_names_the_key(source, expected):
    with pytest.raises(ConfigError) as raised:
        Config.from_deepspeed(source)
    assert str(raised.value).startswith(f"DeepSpeed: {expected}")
    assert "\n" not in str(raised.value)


# As a Config


def test_a_file_and_a_dict_differ_only_in_the_origins_of_values(directories):
    (directories / "ds").write_text(json.dumps(INFINITY))
    config = Config.from_deepspeed("ds")
    assert config == Config.from_deepspeed(INFINITY)
    assert config.conversion == Config.from_deepspeed(INFINITY).conversion
    assert config.origins == dict.fromkeys(("param_tier", "optimizer_state_tier", "swap_dirs", "activation_tier", "dtype", "nonfinite"), "ds")
    assert Config.from_deepspeed(INFINITY).origins["dtype"] == "DeepSpeed"
    assert pickle.loads(pickle.dumps(config)).conversion == config.conversion


def test_arguments_override_the_deepspeed_configuration():
    config = Config.from_deepspeed(INFINITY, swap_dirs="two", nonfinite="auto")
    assert config == Config(swap_dirs="two", param_tier="nvme", optimizer_state_tier="nvme", activation_tier="host", dtype="bf16")
    assert (config.origins["swap_dirs"], config.origins["param_tier"]) == ("argument", "DeepSpeed")


def test_the_error_of_a_missing_directory_names_the_file(directories):
    (directories / "ds.json").write_text(json.dumps(with_zero(offload_param={"device": "nvme", "nvme_path": "three"})))
    with pytest.raises(ConfigError) as raised:
        Config.from_deepspeed("ds.json")
    assert str(raised.value) == "ds.json: swap_dirs: three does not exist; create it (mkdir -p three) or name another"
