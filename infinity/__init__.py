"""Train PyTorch models far larger than device memory: every state lives on the device, in host memory or on NVMe."""

from infinity.config import Config
from infinity.engine import Engine, engine_of, gathered, offload
from infinity.importing import load_safetensors
from infinity.init import init
from infinity.errors import BudgetError, CheckpointError, ConfigError, NonFiniteError, PeerError, SwapError, UsageError
from infinity.optimizer import SGD, Adam, AdamW, Elementwise, Lion
from infinity.recompute import checkpoint
from infinity.residency import leaf
from infinity.rules import Rule
from infinity.loading import Loaded, load
from infinity.saving import Saving, save
from infinity.scaling import LossScale
from infinity.tiling import TiledEmbedding, TiledLinear, linear_cross_entropy, tile_large_layers
from infinity.tracing import save_trace
from infinity.vertical import vertical

__all__ = [
    "Adam",
    "AdamW",
    "BudgetError",
    "CheckpointError",
    "Config",
    "ConfigError",
    "Elementwise",
    "Engine",
    "Lion",
    "Loaded",
    "LossScale",
    "NonFiniteError",
    "PeerError",
    "Rule",
    "SGD",
    "Saving",
    "SwapError",
    "TiledEmbedding",
    "TiledLinear",
    "UsageError",
    "checkpoint",
    "engine_of",
    "gathered",
    "init",
    "leaf",
    "linear_cross_entropy",
    "load",
    "load_dcp",
    "load_safetensors",
    "offload",
    "save",
    "save_dcp",
    "save_trace",
    "tile_large_layers",
    "vertical",
]


def __getattr__(name: str):
    """The bridge to torch.distributed.checkpoint comes when it is asked for: that package alone takes a second to import."""
    if name in ("load_dcp", "save_dcp"):
        from infinity import dcp

        return getattr(dcp, name)
    raise AttributeError(f"module 'infinity' has no attribute {name!r}")
