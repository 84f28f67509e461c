"""The `config` command: what the engine's settings are here, where each came from, and what a configuration of DeepSpeed's becomes.

Uses configurations as any program would. Must not know how a setting is checked or converted, nor what the engine makes of it.
"""

import dataclasses
import json

from infinity.config import Config, command_layers, format_bytes, set_layers
from infinity.errors import ConfigError

BYTES = ("host_memory", "device_memory", "tile_above")


def show(arguments) -> int:
    """The `show` command."""
    if arguments.from_deepspeed is None:
        config = Config.layered(command_layers(arguments))
    elif arguments.config is None:
        config = Config.layered(set_layers(arguments), deepspeed=arguments.from_deepspeed)
    else:
        raise ConfigError("--from-deepspeed and --config: expected one of them; leave out the other")
    names = [field.name for field in dataclasses.fields(Config)]
    origins = {name: config.origins.get(name, "default") for name in names}
    if arguments.json:
        report = {"config": config.to_table(), "origins": origins}
        if config.conversion is not None:
            report["conversion"] = dataclasses.asdict(config.conversion)
        print(json.dumps(report, indent=2))
        return 0
    texts = {name: _text(name, getattr(config, name)) for name in names}
    width = max(map(len, texts.values()))
    for name in names:
        print(f"{name:<14}  {texts[name]:<{width}}  {origins[name]}")
    if config.conversion is not None:
        print(f"\n{config.conversion}")
    return 0


def _text(name, value):
    if name == "nvme":
        return ", ".join(map(str, value))
    if name in BYTES and isinstance(value, int):
        return format_bytes(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return "none" if value is None else str(value)
