"""Trainer of transformers: accumulation with a short last window, clipping, evaluation, checkpoints."""

import infinity
from infinity.integrations.transformers import offloaded
from tiny import llama, rows
from transformers import Trainer, TrainingArguments

arguments = TrainingArguments(
    output_dir="run",
    per_device_train_batch_size=2,
    gradient_accumulation_steps=3,
    num_train_epochs=2,
    learning_rate=1e-2,
    max_grad_norm=1.0,
    eval_strategy="epoch",
    save_strategy="epoch",
    load_best_model_at_end=True,
    logging_steps=1,
    report_to=[],
)
trainer = offloaded(Trainer, infinity.Config(dtype="fp32"))(model=llama(), args=arguments, train_dataset=rows(), eval_dataset=rows(6))
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
