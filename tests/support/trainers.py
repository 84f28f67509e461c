"""Shared by tests of integrations: a tiny Llama, data, a tokenizer, Config and TrainingArguments."""

import pytest
import torch

import infinity

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

VOCAB = 64
NUMBERS = ("loss", "grad_norm", "eval_loss", "learning_rate", "mean_token_accuracy")  # logged numbers that tests compare


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCAB, max_position_embeddings=64, **sizes))


def rows(count, length=12, seed=1):
    tokens = torch.randint(4, VOCAB, (count, length), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in tokens]


def tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"<pad>": 0, "<eos>": 1, "<unk>": 2, "<bos>": 3} | {f"w{number}": number for number in range(4, VOCAB)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>", "bos_token": "<bos>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


def words(count, length, seed):
    numbers = torch.randint(4, VOCAB, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()
    return [" ".join(f"w{number}" for number in row) for row in numbers]


def engine_config(folder, **changes):
    places = {"swap_dirs": folder, "dtype": "fp32", "device": "cpu", "param_tier": "nvme", "optimizer_state_tier": "nvme"}
    return infinity.Config(**places | {"host_memory": "64MiB", "device_memory": "16MiB"} | changes)


def arguments(folder, kind=transformers.TrainingArguments, **changes):
    """Two epochs of 11 batches, three per step: the last step of an epoch has two."""
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "num_train_epochs": 2, "learning_rate": 1e-2}
    quiet = {"logging_steps": 1, "report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    return kind(output_dir=str(folder), seed=0, **options | quiet | changes)


def logged(trainer):
    """Logged numbers of a Trainer that must be equal, one dict per event."""
    lines = [{name: value for name, value in line.items() if name in NUMBERS} for line in trainer.state.log_history]
    return [line for line in lines if line]


def assert_equal_lines(got, expected):
    assert [line.keys() for line in got] == [line.keys() for line in expected] and got
    for ours, theirs in zip(got, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
