"""DPOTrainer of TRL: a whole model with a reference model."""

from tiny import llama, preferences, tokenizer
from trl import DPOConfig, DPOTrainer

arguments = DPOConfig(
    output_dir="run",
    bf16=False,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=3,
    num_train_epochs=2,
    learning_rate=1e-2,
    max_grad_norm=1.0,
    max_length=16,
    save_strategy="no",
    logging_steps=1,
    report_to=[],
)
trainer = DPOTrainer(
    llama(), ref_model=llama(), args=arguments, train_dataset=preferences(), processing_class=tokenizer()
)
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
