"""The logarithm of the sum of exponentials of logits, and the logit at each label, with a backward pass in one fp32 buffer.

Knows tensors. Must not know layers, tiles or losses.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable


class LogSumExpAtLabels(torch.autograd.Function):
    """(logits [N, V], labels int64 [N]) -> (logsumexp fp32 [N], logits at the labels fp32 [N]).

    The gradient of the logits is computed in place, in one fp32 buffer of [N, V]. The graph of torch's operations holds several at once: the
    logits, and both gradients before their sum. The values are the same, except that a zero may have the other sign.
    """

    @staticmethod
    def forward(ctx, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = logits.float()
        sums = torch.logsumexp(wide, dim=-1)
        ctx.save_for_backward(logits, labels, sums)
        ctx.set_materialize_grads(False)
        return sums, wide.gather(1, labels.unsqueeze(1)).squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx, of_sums: torch.Tensor | None, at_labels: torch.Tensor | None) -> tuple[torch.Tensor, None]:
        logits, labels, sums = ctx.saved_tensors
        if of_sums is None:
            found = torch.zeros_like(logits, dtype=torch.float32)
        else:
            found = logits.to(torch.float32, copy=True)
            found.sub_(sums.unsqueeze(1)).exp_().mul_(of_sums.unsqueeze(1))
        if at_labels is not None:
            found.scatter_add_(1, labels.unsqueeze(1), at_labels.unsqueeze(1))
        return found.to(logits.dtype), None
