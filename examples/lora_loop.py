"""A loop of plain PyTorch over LoRA adapters, which are merged in the end."""

import infinity
import torch
from peft import LoraConfig, get_peft_model
from tiny import batches, llama

torch.manual_seed(0)
model = get_peft_model(llama(), LoraConfig(r=8, target_modules="all-linear"))
infinity.offload(model, infinity.Config(dtype="fp32"))
optimizer = infinity.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
losses = []
for epoch in range(2):
    for batch in batches():
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
model.save_pretrained("adapters")
