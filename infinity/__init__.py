"""Train PyTorch models far larger than device memory: every state lives on the device, in host memory or on NVMe."""

from infinity.config import Config
from infinity.engine import Engine, engine_of, gathered, offload
from infinity.init import init
from infinity.errors import BudgetError, ConfigError, SwapError, UsageError
from infinity.optimizer import Adam, AdamW

__all__ = [
    "Adam",
    "AdamW",
    "BudgetError",
    "Config",
    "ConfigError",
    "Engine",
    "SwapError",
    "UsageError",
    "engine_of",
    "gathered",
    "init",
    "offload",
]
