"""The model and data of the examples: a Llama with random weights and random tokens. The examples run in seconds, without a download.

In your program, use from_pretrained and your data. If the model does not fit in memory, call from_pretrained inside
`with infinity.init(config):`.
"""

from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, LENGTH = 64, 16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # also the engine's default device
Row = dict[str, torch.Tensor]


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=LENGTH, **sizes))
    model.to(DEVICE)
    return model


def rows(count: int = 22) -> list[Row]:
    tokens = torch.randint(4, VOCAB, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def batches() -> DataLoader[Row]:
    """On the device, as a model's inputs must be. Tools that bring them there themselves find nothing to do."""
    return DataLoader([{name: row.to(DEVICE) for name, row in each.items()} for each in rows()], batch_size=2)  # type: ignore[arg-type]


def words(count: int, length: int, seed: int) -> list[str]:
    numbers = torch.randint(4, VOCAB, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()
    return [" ".join(f"w{number}" for number in row) for row in numbers]


def texts() -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"text": words(22, 12, 1)})


def preferences() -> Any:
    from datasets import Dataset

    return Dataset.from_dict({name: words(22, 6, seed) for seed, name in enumerate(("prompt", "chosen", "rejected"))})


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>", "bos_token": "<bos>"}
    vocab = {word: number for number, word in enumerate(special.values())} | {f"w{number}": number for number in range(4, VOCAB)}
    made = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)
