"""What a user may ask of the engine: one frozen value, validated once, and where each setting came from.

Knows names, ranges and units, and in which order files and options count. Must not know torch, ranks or how anything is
done: what depends on the machine (is there a GPU, how much memory is free, does the model fit) is answered by the engine. Over 400
lines because each setting has its check, and each mistake an answer of its own.
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
LEAST_CHUNK_MIB, LARGEST_CHUNK_MIB = 2**-9, 2**30  # the least is a block
LARGEST_NBYTES = 2**60
LARGEST_SEED = 2**64 - 1  # that torch.manual_seed takes
Layer = tuple[str, Mapping[str, object]]  # where values come from, and the values by field

TierName = Literal["auto", "device", "host", "nvme"]


def _with_checked_names(cls):
    """Make the constructor accept old names of fields, and name the nearest field when a keyword is none."""
    construct = cls.__init__

    @functools.wraps(construct)
    def __init__(self, **values):
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
        near = nearest(unknown, names)
        cure = f"did you mean {near!r}?" if near else f"the fields are {', '.join(names)}"
        problems.append(f"{cls.__name__} has no field {unknown!r}: {cure}")
    return problems


@_with_checked_names
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of an engine. Every field has a default; values are normalised (paths, bytes) and cannot change.

    In files, where there is no None, "none" stands for it. Raises ConfigError, listing every wrong value at once.
    """

    origins: ClassVar[Mapping[str, str]] = {}
    """Where values came from, by name, such as "infinity.toml", "--set" or "--swap-dirs". What is absent is the default, or was
    given in Python. Says nothing about the value: equal configurations may have different origins."""

    conversion: "ClassVar[Conversion | None]" = None
    """Of `from_deepspeed`: what became of every key."""

    swap_dirs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (DEFAULT_SWAP_DIR,)
    """Directories for swap files, best one a drive; a tuple of paths after construction. They must exist, except for
    the default, `infinity-swap` in the current directory, which is created when some state really goes there."""

    host_memory: int | str = "auto"
    """Bound of the pinned host arena of this rank: bytes, "48GiB", or "auto" for a share of what is free."""

    device_memory: int | str = "auto"
    """Bound of what the engine itself holds on the device: bytes, "20GiB", or "auto" for what activations leave free."""

    param_tier: TierName = "auto"
    """Where weights live between uses: auto (the fastest tier with room), device, host or nvme."""

    optimizer_state_tier: TierName = "auto"
    """Where optimizer states live: auto (the fastest tier with room), device, host or nvme."""

    activation_tier: TierName = "auto"
    """Where the activations live that autograd saves while the model runs, such as the inputs of checkpointed blocks, until
    backward: device, host (in what weights and states leave of host_memory, of which a quarter is kept from them; the rest goes
    on to NVMe) or nvme; auto is device, and by layer (`infinity.accumulate`) on one rank the host, where the device has no room."""

    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """What the model computes in: bf16 (a full fp32 master is kept, as weight and residual), fp16 (an fp32 master beside
    it, and a dynamic loss scale) or fp32."""

    optimizer_state_dtype: Literal["fp32", "bf16"] = "fp32"
    """How the optimizer's moments are stored: fp32, or bf16, stochastically rounded, for dtype bf16: 8 bytes a parameter
    instead of 12."""

    compression: Literal["auto", "on", "off"] = "auto"
    """Whether weights and optimizer states move to and from NVMe in fewer bytes, without loss. off: all of them, each time. Else most
    updates leave AdamW's moments there as they are, of a bf16 model, and keep the gradient in host_memory. on: floats
    are coded, too, in about 3/4 of their bytes; auto: beside a CUDA device, if a quarter of the host's cores keeps up with the drives. Their
    speed is known where 1 GiB of swap a drive was once laid out."""

    checksums: bool = True
    """Whether host memory holds a CRC-32C of each 4096 bytes that are written to NVMe, a thousandth of them, with which what is read is
    compared before it is used: a drive that returns other bytes is a SwapError then. False is for measurements of its cost."""

    chunk_mib: float | None = None
    """Size of a chunk, in MiB of 16-bit weights; None chooses one."""

    residency: Literal["auto", "none"] = "auto"
    """auto keeps in faster tiers whatever fits; none keeps nothing beyond what the pipeline needs, for benchmarks."""

    device: str | None = None
    """"cpu", "cuda" or "cuda:1"; None takes CUDA where there is one, else the CPU."""

    update: Literal["auto", "deferred", "backward"] = "auto"
    """When records are updated: deferred (behind the next forward), backward (as gradients arrive, or, of some, behind the next
    forward, where drives are behind), or auto, which takes backward whenever nothing known only later can matter. All give the same bits."""

    nonfinite: Literal["auto", "ignore", "raise", "skip"] = "auto"
    """What a gradient that is infinite or not a number, on any rank, does: ignore (it enters the update, as in plain
    PyTorch), skip (the step changes nothing), raise (step() raises NonFiniteError, and changes nothing), or auto: skip for
    fp16, whose loss scale then shrinks, else ignore."""

    tile_above: int | str | None = "auto"
    """Which linear and embedding layers are cut into tiles, each fetched and freed by itself: those whose weight takes more
    than these bytes ("512MiB"), into tiles of at most as many; with "auto", those that with their gradient take more
    than 7/8 of device_memory, into tiles of at most 1/8 of it; with None, none. Their parameters are new ones, named
    `NAME.tiles.N.weight`; names in state dicts stay. A linear layer in tiles rounds differently from the whole layer; the start block counts
    the layers. See `infinity.tile_large_layers` for the layers left alone."""

    trace: bool = False
    """Record the time of every transfer and op, for `engine.stats()` and tests."""

    verbose: bool = True
    """Whether the engine prints its start block: sizes, tiers and bytes a step. Rank 0 gives it once to the logger "infinity.start", or to
    standard error if the program has configured no logging. `infinity.describe` has the same values."""

    seed: int = 0
    """Seed of whatever the engine itself draws."""

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
        """The table [config] of a TOML file, or "config" of a JSON file; overrides count more.

        A relative path of `swap_dirs` in the file is relative to the file's directory. Raises ConfigError that names the file.
        """
        return cls.layered([(str(path), _table_of(checked_path(path))), ("argument", overrides)])

    @classmethod
    def layered(cls, layers: Iterable[Layer], deepspeed: Mapping | str | os.PathLike | None = None) -> "Config":
        """What comes later counts more; below all of them what `from_deepspeed` makes of a source, if there is one.

        Raises ConfigError that names the origin.
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
        object.__setattr__(config, "origins", Renamed(origins, CONFIG_FIELDS))  # before values are checked, for errors to name them
        object.__setattr__(config, "conversion", conversion)
        config.__init__(**values)
        return config

    @classmethod
    def from_deepspeed(cls, source: Mapping[str, Any] | str | os.PathLike[str], **overrides: Any) -> "Config":
        """What a configuration of DeepSpeed's ZeRO-Infinity, a dict or a JSON file, means here; overrides count more.

        `conversion` of the result says what became of every key. Raises ConfigError for a ZeRO stage other than 3, among others.
        """
        if not isinstance(source, Mapping):
            checked_path(source)
        return cls.layered([("argument", overrides)], deepspeed=source)

    def to_table(self) -> dict:
        """What files hold, for `load` to make an equal one of: numbers, strings, booleans and lists of these.

        Paths are absolute, but for the default one, which a file in the current directory means in the same way.
        """
        table = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            table[field.name] = "none" if value is None else value
        table["swap_dirs"] = [str(path if self.creates_swap_dir else path.absolute()) for path in self.swap_dirs]
        return table

    def _told(self, name, problem) -> str:
        """A problem, which begins with the name of its field, with the place that its value came from."""
        origin = self.origins.get(name)
        if origin == _option(name):
            return origin + problem.removeprefix(name)
        return problem if origin is None else f"{origin}: {problem}"

    def _contradictions(self) -> list[str]:
        found = []
        if self.optimizer_state_dtype == "bf16" and self.dtype in ("fp16", "fp32"):
            problem = f"optimizer_state_dtype='bf16' with dtype={self.dtype!r}: bf16 moments go with dtype='bf16' only"
            found.append(self._told("optimizer_state_dtype", problem))
        if self.dtype == "fp16" and self.nonfinite in ("ignore", "raise"):
            found.append(
                self._told(
                    "nonfinite",
                    f"nonfinite={self.nonfinite!r} with dtype='fp16': its loss scale finds its size by steps that overflow and are "
                    f"skipped. Use nonfinite='auto'.",
                )
            )
        if self.update == "backward" and (self.dtype == "fp16" or self.nonfinite in ("raise", "skip")):
            what = "dtype='fp16'" if self.dtype == "fp16" else f"nonfinite={self.nonfinite!r}"
            found.append(
                self._told(
                    "update",
                    f"update='backward' with {what}: whether a step counts is known only after the backward pass. "
                    f"Use update='deferred' or 'auto'.",
                )
            )
        return found

    @property
    def watches_nonfinite(self) -> bool:
        """Whether gradients are looked at before a step."""
        return self.dtype == "fp16" or self.nonfinite in ("raise", "skip")

    @property
    def creates_swap_dir(self) -> bool:
        """Whether the swap directory may be created: only the default one."""
        return self.swap_dirs == (DEFAULT_SWAP_DIR,)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str):
            """Old names of fields, with a warning."""
            if name not in CONFIG_FIELDS:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            warn_renamed(f"Config.{name}", f"Config.{CONFIG_FIELDS[name]}")
            return getattr(self, CONFIG_FIELDS[name])


CHOICES: dict[str, tuple[str, ...]] = {
    field.name: get_args(field.type) for field in dataclasses.fields(Config) if get_origin(field.type) is Literal
}


def command_layers(arguments, options: Sequence[str] = ()) -> list[Layer]:
    """What a command was told: infinity.toml if it is here and has a table [config], then the file of --config, then --set, then
    those of the command's own options, named by their fields, that were given (are not None)."""
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
    """Those of --set alone."""
    pairs = [config_files.assignment(text) for text in arguments.set]
    return [("--set", {name: value}) for name, value in pairs]


def _table_of(path):
    """[config] of a file, by new names, paths of swap_dirs as seen from here."""
    content = config_files.read(path).get("config")
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path} has no table [config]; put the settings of the engine into one")
    table = with_new_names(content, CONFIG_FIELDS, f"{path}: ")
    swap_dirs = table.get("swap_dirs")
    if isinstance(swap_dirs, (str, list)):
        here = Path(path).parent
        paths = [swap_dirs] if isinstance(swap_dirs, str) else swap_dirs
        table["swap_dirs"] = [here / os.path.expanduser(name) if name and isinstance(name, str) else name for name in paths]
    return table


def converted(source: Mapping | str | os.PathLike) -> tuple[str, "Conversion"]:
    """A configuration of DeepSpeed's: what to call it, and what becomes of it."""
    given = isinstance(source, Mapping)
    origin, content = ("DeepSpeed", source) if given else (str(source), config_files.read_json(checked_path(source)))
    try:
        from infinity.integrations.deepspeed import convert  # imported only for programs that have a DeepSpeed configuration

        return origin, convert(content)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None


def checked_path(path: str | os.PathLike) -> Path:
    """Raises ConfigError for a value that cannot name a file or a directory, such as an empty text."""
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
        raise ConfigError(f"{name}={value!r}: a name is empty, as that of an unset shell variable; name a directory, '.' for this one")
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
        raise ConfigError(f'{name}: {str(value)[:60]} is more than {most}, which no machine has; give what this one has, or "auto"')
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
        raise ConfigError(f"{name}={value!r}: a chunk has {LEAST_CHUNK_MIB} MiB at least; give that or more, or None to choose one")
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
