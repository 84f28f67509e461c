"""The dtypes of the engine by name, as torch has them.

Knows torch's dtypes. Must not know which parameter has which dtype.
"""

import torch

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "int16": torch.int16}
