"""Trainer of Lightning: accumulation with a short last window, clipping, a scheduler, a checkpoint an epoch."""

import infinity
import torch
from infinity.integrations.lightning import EngineStrategy
from lightning import LightningModule, Trainer
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from tiny import batches, llama


class Language(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


losses: list[float] = []
trainer = Trainer(
    strategy=EngineStrategy(infinity.Config(dtype="fp32")),
    max_epochs=2,
    devices=1,
    accumulate_grad_batches=3,
    gradient_clip_val=1.0,
    logger=False,
)
trainer.fit(Language(), batches())
