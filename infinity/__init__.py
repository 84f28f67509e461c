"""Train PyTorch models far larger than device memory: every state lives on the device, in host memory or on NVMe."""

from infinity.config import Config
from infinity.engine import Engine, engine_of, gathered, offload
from infinity.init import init
from infinity.errors import BudgetError, ConfigError, NonFiniteError, PeerError, SwapError, UsageError
from infinity.optimizer import SGD, Adam, AdamW, Elementwise, Lion
from infinity.rules import Rule
from infinity.scaling import LossScale
from infinity.vertical import vertical

__all__ = [
    "Adam",
    "AdamW",
    "BudgetError",
    "Config",
    "ConfigError",
    "Elementwise",
    "Engine",
    "Lion",
    "LossScale",
    "NonFiniteError",
    "PeerError",
    "Rule",
    "SGD",
    "SwapError",
    "UsageError",
    "engine_of",
    "gathered",
    "init",
    "offload",
    "vertical",
]
