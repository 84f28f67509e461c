"""Models on the meta device, where tensors have shapes but no bytes: a GPT by its sizes, or a transformers model by config.json.

Knows the two kinds of models, the blocks in them, what they check, and the largest number of tensors. Must not know plans, or how a prediction is
made.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from infinity.errors import ConfigError, UsageError
from infinity.formats.dtypes import TORCH_DTYPES
from infinity.model.gpt import GPT
from infinity.model.tiled_layers import Tiled
from infinity.output import say

MOST_TENSORS = 25_000  # of a GPT, tiles included: layout and simulated run then take about a minute
MOST_NAMED_TENSORS = 200_000  # of a model that the user names
SECONDS_A_TENSOR = 0.004  # of a plan, with 40,000 tensors on two cores


@dataclass(frozen=True)
class Subject:
    """A model on the meta device. inputs: arguments of a forward pass over the batch of one device, with `tokens` tokens; tensors are on the meta
    device."""

    title: str
    model: nn.Module
    inputs: dict[str, object]
    tokens: int


def gpt(hidden: int, layers: int, heads: int, vocab: int, seq: int, batch: int, dtype: str) -> Subject:
    """A GPT with these sizes. batch: sequences per device."""
    try:
        with torch.device("meta"), _NothingDrawn():
            model = GPT(hidden, layers, heads, vocab, seq).to(TORCH_DTYPES[dtype])
        tokens = torch.empty(batch, seq, dtype=torch.int64, device="meta")
    except RuntimeError as error:
        raise ConfigError(f"hidden {hidden}, vocab {vocab}, batch {batch} x {seq} tokens: {error}; choose smaller sizes") from None
    num = sum(param.numel() for param in model.parameters())
    title = f"GPT of {format_count(num)} parameters: hidden {hidden}, {layers} layers, {batch} x {seq} tokens per device, {dtype}"
    return Subject(title, model, {"tokens": tokens, "targets": tokens}, batch * seq)


class _NothingDrawn(TorchFunctionMode):
    """Skips initialisers: tensors on the meta device have no values, and initialisers would take most of the time."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__module__", None) == nn.init.__name__:
            return kwargs["tensor"] if kwargs and "tensor" in kwargs else args[0]
        return func(*args, **(kwargs or {}))


def hugging_face(path: Path, seq: int, batch: int, dtype: str, *, adapters: int | None = None) -> Subject:
    """A transformers model from config.json. Takes the class that the file names, or a causal language model, or a model without a head.
    adapters: the rank of LoRA adapters of PEFT; None: the whole model is trained.

    Raises UsageError without the package transformers, or peft for adapters, and ConfigError if transformers cannot create the model.
    """
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        state = "is no ordinary file" if path.exists() else "does not exist"
        raise ConfigError(f"--model: {path} {state}; name the config.json of a transformers model, or its folder")
    try:
        import transformers
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    except ImportError:
        raise UsageError(f"--model {path} needs transformers: pip install transformers; or give --hidden and --layers") from None
    try:
        found = AutoConfig.from_pretrained(path)
        named = getattr(transformers, (found.architectures or [""])[0], None)
        if named is None or getattr(named, "_from_config", None) is None:
            named = AutoModelForCausalLM if type(found) in AutoModelForCausalLM._model_mapping else AutoModel
        make = named.from_config if named in (AutoModelForCausalLM, AutoModel) else named._from_config
        with torch.device("meta"):
            model = make(found, dtype=TORCH_DTYPES[dtype])
        inputs = _inputs(model, found, seq, batch, dtype)
    except Exception as error:  # any error of transformers, on any file
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"--model {path}: {first}; name the config.json of a model that transformers can create") from None
    num = sum(param.numel() for param in model.parameters())
    title = f"{type(model).__name__} of {format_count(num)} parameters{_adapt(model, adapters)}: {batch} x {seq} tokens per device, {dtype}"
    return Subject(title, model, inputs, batch * seq)


def _adapt(model: nn.Module, rank: int | None) -> str:
    """Add adapters to a model of transformers. Returns words for the title."""
    if rank is None:
        return ""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise UsageError("--adapters needs peft: pip install peft") from None
    if any(".experts." in name and param.dim() == 3 for name, param in model.named_parameters()):
        raise ConfigError(f"--adapters: {type(model).__name__} packs its experts, and adapters of peft for these do not run without values")
    model.enable_input_require_grads()
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft, about transformers
        get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))
    return f" with adapters of rank {rank}"


def _inputs(model: nn.Module, config, seq: int, batch: int, dtype: str) -> dict:
    """Training inputs of a transformers model, by the argument names of `forward`: `seq` tokens, sound of about `seq` frames, or images.

    Images have the size in the model's config. Models of tokens also get labels.
    """
    names = inspect.signature(model.forward).parameters
    main = model.main_input_name
    tokens = torch.empty(batch, seq, dtype=torch.int64, device="meta")
    found = {}
    if "input_ids" in names:
        found["input_ids"] = tokens
    if "decoder_input_ids" in names:
        found["decoder_input_ids"] = tokens
    if "labels" in names and main == "input_ids":
        found["labels"] = tokens
    if "use_cache" in names or "cache" in names:
        found["use_cache"] = False
    if "pixel_values" in names:
        vision = getattr(config, "vision_config", config)
        sides = vision.image_size if isinstance(vision.image_size, (list, tuple)) else (vision.image_size,) * 2
        found["pixel_values"] = torch.empty(batch, getattr(vision, "num_channels", 3), *sides, dtype=TORCH_DTYPES[dtype], device="meta")
    if "input_values" in names:
        numel = (seq + 1) * math.prod(getattr(config, "conv_stride", (320,)))
        found["input_values"] = torch.empty(batch, numel, dtype=TORCH_DTYPES[dtype], device="meta")
    return found


def gpt_size(parameters: float) -> tuple[int, int]:
    """Hidden size (a multiple of 128) and number of layers of a transformer with about `parameters` parameters.

    Source: proportions of table 1 of the paper, and of table 2.1 in Brown et al. 2020.
    """
    per_layer = 128 * (parameters / 1e11) ** (0.2 if parameters > 1e11 else 0.1)  # hidden size per layer
    hidden = max(128, round((parameters * per_layer / 12) ** (1 / 3) / 128) * 128)
    return hidden, max(1, round(parameters / (12 * hidden**2)))


def num_heads(hidden: int) -> int:
    """The number of heads with about 128 elements each."""
    most = max(1, hidden // 128)
    return next(heads for heads in range(most, 0, -1) if hidden % heads == 0)


def outer_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules in the outermost ModuleLists, without tiles."""
    tiles = {id(module.tiles) for module in model.modules() if isinstance(module, Tiled)}
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and id(module) not in tiles]
    inner = {id(below) for blocks in lists for block in blocks for below in block.modules()}
    return [block for blocks in lists if id(blocks) not in inner for block in blocks]


def format_count(num: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if num >= size:
            return f"{num / size:.4g} {unit}"
    return f"{num:,.0f}"


@contextlib.contextmanager
def unchecked_values() -> Iterator[None]:
    """Inside the block, transformers does not check values of inputs: without values, for example no token stands for an image."""
    name = "TRANSFORMERS_DISABLE_TORCH_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


class TooManyTensors(ConfigError):
    """A model with too many tensors for a plan in reasonable time."""

    def __init__(self, what: str, most: int):
        super().__init__(f"{what}; a plan may have at most {most:,} tensors: choose fewer layers, or larger tiles by larger devices or tile_above")


@contextlib.contextmanager
def few_tensors(most: int | None = None) -> Iterator[None]:
    """A context that raises TooManyTensors as soon as code inside registers more than `most` parameters, by default MOST_TENSORS. Beyond
    MOST_TENSORS the context tells the user that the plan takes long."""
    num, most = 0, most or MOST_TENSORS

    def count(module, name, param):
        nonlocal num
        num += 1
        if num > most:
            raise TooManyTensors(f"the model has more than {most:,} parameter tensors", most)

    registered = nn.modules.module.register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        registered.remove()
    if num > MOST_TENSORS:
        say(f"a plan of {num:,} tensors takes {num * SECONDS_A_TENSOR / 60:.0f} minutes or more")
