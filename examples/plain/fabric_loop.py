"""A loop with Fabric: accumulation, clipping, a checkpoint at the end."""

import torch
from lightning import Fabric
from tiny import batches, llama

fabric = Fabric(devices=1)
fabric.launch()
model = llama()
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
loader = fabric.setup_dataloaders(batches())
losses = []
for number, batch in enumerate(loader):
    is_last = number % 3 == 2 or number == len(loader) - 1
    with fabric.no_backward_sync(model, enabled=not is_last):
        loss = model(**batch).loss
        fabric.backward(loss / 3)
    losses.append(loss.item())
    if is_last:
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
fabric.save("run.ckpt", {"model": model, "optimizer": optimizer})
