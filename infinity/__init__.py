"""Train PyTorch models that are far larger than device memory. Model states live on the device, in host memory or on NVMe."""

from typing import TYPE_CHECKING

from infinity.checkpoints.latest import latest
from infinity.checkpoints.load import Loaded, load
from infinity.checkpoints.load_safetensors import load_safetensors
from infinity.checkpoints.save import Saving, save
from infinity.config import Config
from infinity.engine.access.average import EMA
from infinity.engine.construction import init
from infinity.engine.description import Description, describe
from infinity.engine.engine import Engine
from infinity.engine.layerwise.accumulate import accumulate
from infinity.engine.offload import engine_of, gathered, offload
from infinity.engine.steps.no_sync import no_sync
from infinity.engine.trace_file import save_trace
from infinity.errors import BudgetError, CheckpointError, ConfigError, NonFiniteError, PeerError, SwapError, UsageError
from infinity.model.leaf_modules import leaf
from infinity.model.recompute import checkpoint
from infinity.model.tiled_layers import TiledEmbedding, TiledLinear, linear_cross_entropy
from infinity.model.tiling import tile_large_layers
from infinity.optim.loss_scale import LossScale
from infinity.optim.muon import Muon
from infinity.optim.optimizers import SGD, Adam, AdamW, Lion, Optimizer
from infinity.optim.rules import Rule
from infinity.renamed import warn_renamed
from infinity.version import __version__

__all__ = [
    "Adam",
    "AdamW",
    "BudgetError",
    "CheckpointError",
    "Config",
    "ConfigError",
    "Description",
    "EMA",
    "Engine",
    "Lion",
    "Loaded",
    "LossScale",
    "Muon",
    "NonFiniteError",
    "Optimizer",
    "PeerError",
    "Rule",
    "SGD",
    "Saving",
    "SwapError",
    "TiledEmbedding",
    "TiledLinear",
    "UsageError",
    "__version__",
    "accumulate",
    "checkpoint",
    "describe",
    "engine_of",
    "gathered",
    "init",
    "latest",
    "leaf",
    "linear_cross_entropy",
    "load",
    "load_dcp",
    "load_safetensors",
    "no_sync",
    "offload",
    "save",
    "save_dcp",
    "save_trace",
    "tile_large_layers",
]

if TYPE_CHECKING:
    from infinity.checkpoints.dcp_load import load_dcp
    from infinity.checkpoints.dcp_save import save_dcp
else:

    def __getattr__(name: str):
        """Import the functions for torch.distributed.checkpoint when a program uses them: that package alone takes 1 s to import. Also
        find the old name `Elementwise`."""
        if name in ("load_dcp", "save_dcp"):
            from infinity.checkpoints import dcp_load, dcp_save

            return dcp_load.load_dcp if name == "load_dcp" else dcp_save.save_dcp
        if name == "Elementwise":
            warn_renamed("infinity.Elementwise", "infinity.Optimizer")
            return Optimizer
        raise AttributeError(f"module 'infinity' has no attribute {name!r}")
