"""The settings of an engine: one frozen value, validated once, and the origin of each setting.

Knows names, ranges and units of settings, and the precedence of files and options. Must not know torch, ranks or how the engine works. The
engine checks all that depends on the machine: GPUs, free memory, the size of the model.
"""

import dataclasses
import difflib
import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args, get_origin

from infinity import config_files
from infinity.errors import ConfigError
from infinity.renamed import CONFIG_FIELDS, Renamed, warn_renamed, with_new_names
from infinity.sizes import format_bytes, parse_budget
from infinity.spelling import nearest
from infinity.system.mounts import why_no_path

if TYPE_CHECKING:
    from infinity.integrations.deepspeed import Conversion

DEFAULT_SWAP_DIR = Path("infinity-swap")
LEAST_CHUNK_MIB, LARGEST_CHUNK_MIB = 2**-9, 2**30  # the smallest chunk is one block of 1,024 elements
LARGEST_NBYTES = 2**60
LARGEST_SEED = 2**64 - 1  # the limit of torch.manual_seed
Layer = tuple[str, Mapping[str, object]]  # the origin of some values, and the values by field

TierName = Literal["auto", "device", "host", "nvme"]


def _with_checked_names(cls):
    """Make the constructor accept old names of fields. If a keyword is not a field, the error names the nearest field."""
    construct = cls.__init__

    @functools.wraps(construct)
    def __init__(self, **values):
        if all(field.name in values for field in dataclasses.fields(cls)):  # of dataclasses.replace: only a change can have an old name
            changed = {new for old, new in CONFIG_FIELDS.items() if old in values}
            values = {name: value for name, value in values.items() if name not in changed}
        values = with_new_names(values, CONFIG_FIELDS, f"{cls.__name__}: ")
        if problems := _unknown_fields(cls, values):
            raise ConfigError("\n".join(problems))
        construct(self, **values)

    cls.__init__ = __init__
    return cls


def _unknown_fields(cls, values):
    names = [field.name for field in dataclasses.fields(cls)]
    problems = []
    for unknown in (name for name in values if name not in names):
        near = nearest(unknown, [*names, *CONFIG_FIELDS])
        cure = f"did you mean {CONFIG_FIELDS.get(near, near)!r}?" if near else f"the fields are {', '.join(names)}"
        problems.append(f"{cls.__name__} has no field {unknown!r}: {cure}")
    return problems


@_with_checked_names
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of an engine. Every field has a default. Values are normalised (paths, bytes) and cannot change.

    TOML has no None: files write "none" instead. Raises ConfigError, which lists every wrong value at once.
    """

    origins: ClassVar[Mapping[str, str]] = {}
    """The origin of values by field, such as "infinity.toml" or "--set"; none for defaults and values set in Python. Not compared."""

    conversion: "ClassVar[Conversion | None]" = None
    """The result of `from_deepspeed` for every key of the DeepSpeed configuration."""

    swap_dirs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (DEFAULT_SWAP_DIR,)
    """Directories for swap files, preferably one on each drive. After construction the value is a tuple of paths. The directories must exist.
    Only the default, `infinity-swap` in the current directory, is created, when the engine first stores data there."""

    host_memory: int | str = "auto"
    """Limit of the pinned host memory of this rank: bytes, "48GiB", or "auto" for a share of the free host memory. If `param_tier` or
    `optimizer_state_tier` is "nvme", and clipped steps have one backward pass, the engine fills the rest with copies of records."""

    device_memory: int | str = "auto"
    """Limit of the device memory that the engine itself uses: bytes, "20GiB", or "auto" for the memory that activations leave free."""

    param_tier: TierName = "auto"
    """Tier of weights between uses: auto (the fastest tier with room), device, host or nvme."""

    optimizer_state_tier: TierName = "auto"
    """Tier of optimizer states: auto (the fastest tier with room), device, host or nvme."""

    activation_tier: TierName = "auto"
    """Tier of saved activations until backward, such as the inputs of checkpointed blocks: auto, device, host or nvme. host uses the host
    memory that weights and optimizer states leave, at least 25 %. The rest goes to NVMe. auto is device. With layer-wise accumulation
    (`infinity.accumulate`) on one rank, auto uses the host if the device has no room."""

    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """The compute dtype of the model: bf16 (weight and residual are an fp32 master), fp16 (with an fp32 master and a loss scale) or fp32."""

    master: Literal["fp32", "none"] = "fp32"
    """none: bf16 weights have no fp32 master, and each update is rounded stochastically to bf16. A record is 2 bytes a parameter smaller."""

    optimizer_state_dtype: Literal["fp32", "bf16", "8bit"] = "fp32"
    """The dtype of stored optimizer moments: fp32, or bf16 or 8bit with stochastic rounding, which need dtype bf16. A record of AdamW takes 12, 8
    or 6.02 bytes a parameter. 8bit: 8-bit floating-point values, 128 with one scale."""

    frozen_dtype: Literal["same", "nf4", "int8", "fp8", "mxfp4"] = "same"
    """The storage of frozen weights of hidden linear layers that compute in bf16: as they are, or quantised, in 4.5, 8.25, 8.25 or 4.25 bits.
    The copy to the device expands them to bf16. Embeddings, the output layer, vectors and convolutions stay as they are."""

    compression: Literal["auto", "on", "off"] = "auto"
    """Lossless compression of weights and optimizer states on NVMe. off: all bytes move in each step. Otherwise most updates of a bf16 model do
    not rewrite AdamW's moments on NVMe, and keep the gradient in host_memory. on: floats are also coded, in about 3/4 of their bytes. auto:
    floats are coded beside a CUDA device, if a quarter of the host's cores is as fast as the drives. The engine knows the speed of a drive
    after it has allocated 1 GiB of swap there."""

    checksums: bool = True
    """Whether the engine checks data from NVMe before use. Host memory keeps a CRC-32C of each 4096 bytes written, 0.1 % of the data. If a
    drive returns other bytes, the engine raises SwapError. False is for measurements of the cost."""

    chunk_mib: float | None = None
    """Size of a chunk, in MiB of 16-bit weights. With None the engine chooses the size."""

    residency: Literal["auto", "none"] = "auto"
    """auto keeps as much as fits in the faster tiers. none keeps there only the data that the pipeline needs, for benchmarks."""

    device: str | None = None
    """"cpu", "cuda" or "cuda:1". None takes a CUDA device if the machine has one, otherwise the CPU."""

    update: Literal["auto", "deferred", "backward"] = "auto"
    """When the optimizer updates records. deferred: during the next forward pass. backward: when gradients arrive; if the drives are too slow,
    some updates run during the next forward pass. auto: backward, unless a value that is known only after the backward pass may change the
    update, such as the gradient norm. All give the same bits."""

    nonfinite: Literal["auto", "ignore", "raise", "skip"] = "auto"
    """The reaction to an infinite or NaN gradient on any rank. ignore: the gradient enters the update, as in plain PyTorch. skip: the step
    changes nothing. raise: step() raises NonFiniteError and changes nothing. auto: skip for fp16, whose loss scale then shrinks, otherwise
    ignore."""

    tile_above: int | str | None = "auto"
    """Cuts large linear and embedding layers into tiles, which the engine fetches and frees one by one. With a size ("512MiB"), layers with a
    larger weight are cut into tiles of at most this size. With "auto", layers whose weight and gradient take more than 7/8 of device_memory are
    cut into tiles of at most 1/8 of device_memory. With several ranks, a trainable layer is cut from half of that on, because the reduction of
    the gradient needs buffers. With None, no layer is cut. The tiles are new parameters, named `NAME.tiles.N.weight`. Names in state dicts stay.
    A tiled linear layer rounds differently from the whole layer. The start block counts the tiled layers.
    `infinity.tile_large_layers` lists the layers that are never cut."""

    trace: bool = False
    """Record the time of every transfer and op, for `engine.stats()` and tests."""

    verbose: bool = True
    """Whether the engine prints its start block: sizes, tiers and bytes a step. Rank 0 sends the block once to the logger "infinity.start", or
    to standard error if the program has configured no logging. `infinity.describe` has the same values."""

    seed: int = 0
    """Seed of the engine's own random numbers."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickle, also an object that was pickled with old names."""
        vars(self).update(with_new_names(state, CONFIG_FIELDS))

    def __post_init__(self):
        problems = []

        def settle(name, check):
            try:
                object.__setattr__(self, name, check(name, getattr(self, name)))
            except ConfigError as error:
                problems.append(self._told(name, str(error)))

        settle("swap_dirs", _paths)
        settle("host_memory", _budget)
        settle("device_memory", _budget)
        for name in CHOICES:
            settle(name, _choice)
        settle("chunk_mib", _size_mib)
        settle("device", _device)
        settle("tile_above", _limit)
        settle("checksums", _flag)
        settle("trace", _flag)
        settle("verbose", _flag)
        settle("seed", _seed)
        problems += self._contradictions()
        if problems:
            raise ConfigError("\n".join(problems))

    @classmethod
    def load(cls, path: str | os.PathLike[str], **overrides: Any) -> "Config":
        """Load the table [config] of a TOML file, or "config" of a JSON file. Keyword arguments override the file.

        A relative path of `swap_dirs` in the file is relative to the file's directory. Raises ConfigError, which names the file.
        """
        return cls.layered([(str(path), _table_of(checked_path(path))), ("argument", overrides)])

    @classmethod
    def layered(cls, layers: Iterable[Layer], deepspeed: Mapping | str | os.PathLike | None = None) -> "Config":
        """Combine layers of values. A later layer overrides an earlier one. All layers override the converted DeepSpeed configuration.

        Raises ConfigError, which names the origin.
        """
        values, origins, problems, conversion = {}, {}, [], None
        if deepspeed is not None:
            origin, conversion = converted(deepspeed)
            layers = [(origin, conversion.config), *layers]
        for origin, layer in layers:
            try:
                layer = with_new_names(layer, CONFIG_FIELDS, f"{origin}: ")
            except ConfigError as error:
                problems.append(str(error))
                continue
            problems += [f"{origin}: {problem}" for problem in _unknown_fields(cls, layer)]
            values |= layer
            origins |= dict.fromkeys(layer, origin)
        if problems:
            raise ConfigError("\n".join(problems))
        config = cls.__new__(cls)
        object.__setattr__(config, "origins", Renamed(origins, CONFIG_FIELDS))  # errors about values name the origins
        object.__setattr__(config, "conversion", conversion)
        config.__init__(**values)
        return config

    @classmethod
    def from_deepspeed(cls, source: Mapping[str, Any] | str | os.PathLike[str], **overrides: Any) -> "Config":
        """Convert a configuration of DeepSpeed's ZeRO-Infinity, a dict or a JSON file. Keyword arguments override the converted values.

        `conversion` of the result lists the result for every key. Raises ConfigError, for example for a ZeRO stage other than 3.
        """
        if not isinstance(source, Mapping):
            checked_path(source)
        return cls.layered([("argument", overrides)], deepspeed=source)

    def to_table(self) -> dict:
        """The settings as numbers, strings, booleans and lists of these. A file with this table loads as an equal configuration.

        Paths are absolute. Only the default path stays relative, to the current directory.
        """
        table = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            table[field.name] = "none" if value is None else value
        table["swap_dirs"] = [str(path if self.creates_swap_dir else path.absolute()) for path in self.swap_dirs]
        return table

    def _told(self, name, problem) -> str:
        """The problem with the origin of the field's value in front. problem: begins with the name of the field."""
        origin = self.origins.get(name)
        if origin == _option(name):
            return origin + problem.removeprefix(name)
        return problem if origin is None else f"{origin}: {problem}"

    def _contradictions(self) -> list[str]:
        found = []

        def refuse(name, text):
            found.append(self._told(name, f"{name}={getattr(self, name)!r} {text}"))

        for name, usual in (("optimizer_state_dtype", "fp32"), ("master", "fp32"), ("frozen_dtype", "same")):
            if getattr(self, name) != usual and self.dtype != "bf16":
                refuse(name, f"with dtype={self.dtype!r}: this value goes with dtype='bf16' only")
        if self.dtype == "fp16" and self.nonfinite in ("ignore", "raise"):
            steps = "the loss scale adapts by steps that overflow, which are skipped"
            refuse("nonfinite", f"with dtype='fp16': {steps}. Use nonfinite='auto'.")
        if self.update == "backward" and (self.dtype == "fp16" or self.nonfinite in ("raise", "skip")):
            what = "dtype='fp16'" if self.dtype == "fp16" else f"nonfinite={self.nonfinite!r}"
            known = "the engine knows only after the backward pass whether all gradients are finite"
            refuse("update", f"with {what}: {known}. Use update='deferred' or 'auto'.")
        return found

    @property
    def watches_nonfinite(self) -> bool:
        """Whether the engine looks for infinite and NaN gradients before a step."""
        return self.dtype == "fp16" or self.nonfinite in ("raise", "skip")

    @property
    def creates_swap_dir(self) -> bool:
        """Whether the swap directory may be created: only the default one."""
        return self.swap_dirs == (DEFAULT_SWAP_DIR,)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str):
            """Read a field by its old name, with a warning."""
            if name not in CONFIG_FIELDS:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            warn_renamed(f"Config.{name}", f"Config.{CONFIG_FIELDS[name]}")
            return getattr(self, CONFIG_FIELDS[name])


CHOICES: dict[str, tuple[str, ...]] = {
    field.name: get_args(field.type) for field in dataclasses.fields(Config) if get_origin(field.type) is Literal
}


def command_layers(arguments, options: Sequence[str] = ()) -> list[Layer]:
    """The layers of a command, in order: infinity.toml of the current directory, the file of --config, --set, the command's own options.

    A file infinity.toml without a table [config] is ignored. options: names of the own options, as names of fields. None means not given.
    """
    layers = []
    if Path(config_files.DEFAULT_NAME).is_file() and "config" in config_files.read(config_files.DEFAULT_NAME):
        layers.append((config_files.DEFAULT_NAME, _table_of(config_files.DEFAULT_NAME)))
    if arguments.config is not None:
        layers.append((str(arguments.config), _table_of(arguments.config)))
    layers += set_layers(arguments)
    for name in options:
        value = getattr(arguments, name)
        if value is not None:
            layers.append((_option(name), {name: value}))
    return layers


def _option(name: str) -> str:
    """The command's option for a field."""
    return f"--{name.replace('_', '-')}"


def set_layers(arguments) -> list[Layer]:
    """The layers of --set alone."""
    pairs = [config_files.assignment(text) for text in arguments.set]
    return [("--set", {name: value}) for name, value in pairs]


def _table_of(path):
    """The table [config] of a file, with new names of fields. Paths of swap_dirs are relative to the current directory."""
    content = config_files.read(path).get("config")
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path} has no table [config]; put the settings of the engine into this table")
    table = with_new_names(content, CONFIG_FIELDS, f"{path}: ")
    swap_dirs = table.get("swap_dirs")
    if isinstance(swap_dirs, (str, list)):
        here = Path(path).parent
        paths = [swap_dirs] if isinstance(swap_dirs, str) else swap_dirs
        table["swap_dirs"] = [here / os.path.expanduser(name) if name and isinstance(name, str) else name for name in paths]
    return table


def converted(source: Mapping | str | os.PathLike) -> tuple[str, "Conversion"]:
    """The name of a DeepSpeed configuration for messages, and the result of its conversion."""
    given = isinstance(source, Mapping)
    origin, content = ("DeepSpeed", source) if given else (str(source), config_files.read_json(checked_path(source)))
    try:
        from infinity.integrations.deepspeed import convert  # imported only for programs that have a DeepSpeed configuration

        return origin, convert(content)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None


def checked_path(path: str | os.PathLike) -> Path:
    """The path. Raises ConfigError for a value that cannot name a file or a directory, such as an empty text."""
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(f"{path!r:.60}: expected a path, as text or pathlib.Path; got {type(path).__name__}")
    if reason := why_no_path(path):
        raise ConfigError(reason)
    return Path(path)


def _paths(name, value):
    given = [value] if isinstance(value, (str, os.PathLike)) else value
    if not isinstance(given, Sequence) or not given or not all(isinstance(path, (str, os.PathLike)) for path in given):
        raise ConfigError(f"{name}={value!r}: expected a directory or a list of directories")
    if "" in given:
        raise ConfigError(f"{name}={value!r}: a name is empty, as from an unset shell variable; name a directory, or '.' for the current one")
    for path in given:
        if reason := why_no_path(path):
            raise ConfigError(f"{name}: {reason}")
    paths = tuple(Path(os.path.expanduser(path)) for path in given)
    seen = {}
    for path in paths:
        if path == DEFAULT_SWAP_DIR and len(paths) == 1 and not path.exists():
            continue
        if not path.is_dir():
            if os.path.lexists(path):
                raise ConfigError(f"{name}: {path} is not a directory; name a directory")
            raise ConfigError(f"{name}: {path} does not exist; create it (mkdir -p {path}) or name another")
        if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigError(f"{name}: {path} is not writable by this user; change its mode or name another")
        real = path.resolve()
        if real in seen:
            raise ConfigError(f"{name}: {seen[real]} and {path} are one directory; name each only once")
        seen[real] = path
    return paths


def _budget(name, value):
    if value == "auto":
        return value
    try:
        nbytes = parse_budget(value)
    except ConfigError as error:
        raise ConfigError(f'{name}: {error}, or "auto"') from None
    if nbytes > LARGEST_NBYTES:
        most = format_bytes(LARGEST_NBYTES)
        raise ConfigError(f'{name}: {str(value)[:60]} is more than {most}, which no machine has; give the memory of this one, or "auto"')
    return nbytes


def _limit(name, value):
    if value in (None, "none"):
        return None
    try:
        return _budget(name, value)
    except ConfigError as error:
        raise ConfigError(f"{error}, or None") from None


def _choice(name, value):
    choices = CHOICES[name]
    if isinstance(value, str) and value in choices:
        return value
    near = difflib.get_close_matches(str(value).lower(), choices, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"{name}={value!r}: expected {_either(choices)}{hint}")


def _either(choices):
    return " or ".join(filter(None, (", ".join(map(repr, choices[:-1])), repr(choices[-1]))))


def _size_mib(name, value):
    if value in (None, "none"):
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= LARGEST_CHUNK_MIB:
        raise ConfigError(f"{name}={value!r}: expected a number of MiB above zero, at most {LARGEST_CHUNK_MIB}, or None to choose one")
    if value < LEAST_CHUNK_MIB:
        raise ConfigError(f"{name}={value!r}: expected at least {LEAST_CHUNK_MIB} MiB, or None to choose one")
    return value


def _device(name, value):
    if value in (None, "none"):
        return None
    if not re.fullmatch(r"cpu|cuda(:\d+)?", str(value)):
        raise ConfigError(f"{name}={str(value)!r}: expected 'cpu', 'cuda' or 'cuda:N', or None to choose one")
    return str(value)


def _flag(name, value):
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: expected True or False")
    return value


def _seed(name, value):
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST_SEED:
        raise ConfigError(f"{name}={value!r}: expected an integer from 0 to {LARGEST_SEED}")
    return value
