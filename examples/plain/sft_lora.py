"""SFTTrainer of TRL with LoRA adapters."""

from peft import LoraConfig
from tiny import llama, texts, tokenizer
from trl import SFTConfig, SFTTrainer

arguments = SFTConfig(
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
trainer = SFTTrainer(
    llama(),
    arguments,
    train_dataset=texts(),
    processing_class=tokenizer(),
    peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"]),
)
trainer.train()
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
