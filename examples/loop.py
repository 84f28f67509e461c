"""A loop of plain PyTorch, clipped, with a scheduler."""

import infinity
import torch
from tiny import batches, llama

model = llama()
infinity.offload(model, infinity.Config(dtype="fp32", update="deferred"))
optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=22)
losses = []
for epoch in range(2):
    for batch in batches():
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
