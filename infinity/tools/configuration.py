"""The `config` command: shows the engine's settings, the origin of each, and the settings for a DeepSpeed configuration.

Uses configurations as any program would. Must not know how a setting is checked or converted, or how the engine uses a setting.
"""

import dataclasses
import json
import sys
from pathlib import Path

from infinity.config import DEFAULT_SWAP_DIR, Config, command_layers, converted, set_layers
from infinity.errors import ConfigError
from infinity.sizes import format_bytes

BYTES = ("host_memory", "device_memory", "tile_above")


def show(arguments) -> int:
    """The `show` command."""
    elsewhere = ()  # directories that a source names and this machine lacks
    if arguments.from_deepspeed is None:
        config = Config.layered(command_layers(arguments))
    elif arguments.config is None:
        config, elsewhere = _from_deepspeed(arguments)
    else:
        raise ConfigError("--from-deepspeed and --config: expected one of them; leave out the other")
    names = [field.name for field in dataclasses.fields(Config)]
    origins = {name: config.origins.get(name, "default") for name in names}
    for path in elsewhere:
        print(
            f"infinity: {arguments.from_deepspeed}: swap_dirs: {path} does not exist on this machine. Before you "
            f"train, create it (mkdir -p {path}) or name another directory (--set swap_dirs=DIR)",
            file=sys.stderr,
        )
    if arguments.json:
        report = {"config": config.to_table(), "origins": origins}
        if elsewhere:
            report["config"]["swap_dirs"] = list(map(str, config.conversion.config["swap_dirs"]))
        if config.conversion is not None:
            report["conversion"] = dataclasses.asdict(config.conversion)
        print(json.dumps(report, indent=2))
        return 0
    texts = {name: _text(name, getattr(config, name)) for name in names}
    if elsewhere:
        texts["swap_dirs"] = _text("swap_dirs", config.conversion.config["swap_dirs"])
    width, name_width = max(map(len, texts.values())), max(map(len, names))
    for name in names:
        print(f"{name:<{name_width}}  {texts[name]:<{width}}  {origins[name]}")
    if config.conversion is not None:
        print(f"\n{config.conversion}")
    return 0


def _from_deepspeed(arguments):
    """The Config of the DeepSpeed file and --set, and the swap directories that this machine lacks.

    `show` does not use the directories. If some are missing, swap_dirs has the default here, and all other settings are checked.
    """
    layers = set_layers(arguments)
    origin, conversion = converted(arguments.from_deepspeed)
    elsewhere = []
    if not any("swap_dirs" in layer for _, layer in layers):
        elsewhere = [path for path in conversion.config.get("swap_dirs", ()) if not Path(path).expanduser().exists()]
    if elsewhere:
        layers = [(origin, {"swap_dirs": DEFAULT_SWAP_DIR}), *layers]
    return Config.layered(layers, deepspeed=arguments.from_deepspeed), elsewhere


def _text(name, value):
    if name == "swap_dirs":
        return ", ".join(map(str, value))
    if name in BYTES and isinstance(value, int):
        return format_bytes(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return "none" if value is None else str(value)
