"""A loop with accelerate: accumulation with a short last window, clipping, a scheduler, and saved states."""

import infinity
import torch
from accelerate import Accelerator
from infinity.integrations.accelerate import offloaded
from tiny import batches, llama

accelerator = offloaded(Accelerator, infinity.Config(dtype="fp32"))(gradient_accumulation_steps=3)
model = llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, batches(), scheduler)
losses = []
for epoch in range(2):
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.save_state(f"run/epoch-{epoch}")
