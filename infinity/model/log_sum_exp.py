"""The logarithm of the sum of exponentials of logits, and the logit at each label, with few fp32 copies of the logits.

Knows tensors. Must not know layers, tiles or losses.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

BLOCK_NBYTES = 256 << 20  # most bytes of fp32 logits at a time in backward


class LogSumExpAtLabels(torch.autograd.Function):
    """(logits [N, V], labels int64 [N]) -> (logsumexp fp32 [N], logits at the labels fp32 [N]).

    The forward pass computes in place, in one fp32 buffer of [N, V], and the backward pass in a buffer for some rows at a time. The graph of
    torch's operations holds several buffers of [N, V] at once: the logits, their exponentials, and both gradients before their sum. The values
    are the same, except that a zero may have the other sign.
    """

    @staticmethod
    def forward(ctx, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = logits.to(torch.float32, copy=True)
        at_labels = wide.gather(1, labels.unsqueeze(1)).squeeze(1)
        most = wide.amax(dim=-1, keepdim=True)
        most.masked_fill_(most.isinf(), 0)  # otherwise inf - inf
        sums = wide.sub_(most).exp_().sum(dim=-1).log_().add_(most.squeeze(1))
        ctx.save_for_backward(logits, labels, sums)
        ctx.set_materialize_grads(False)
        return sums, at_labels

    @staticmethod
    @once_differentiable
    def backward(ctx, of_sums: torch.Tensor | None, at_labels: torch.Tensor | None) -> tuple[torch.Tensor, None]:
        logits, labels, sums = ctx.saved_tensors
        found = torch.empty_like(logits)
        num_rows = max(1, BLOCK_NBYTES // (4 * max(1, logits.shape[1])))
        for begin in range(0, logits.shape[0], num_rows):
            rows = slice(begin, begin + num_rows)
            if of_sums is None:
                part = torch.zeros_like(logits[rows], dtype=torch.float32)
            else:
                part = logits[rows].to(torch.float32, copy=True)
                part.sub_(sums[rows].unsqueeze(1)).exp_().mul_(of_sums[rows].unsqueeze(1))
            if at_labels is not None:
                part.scatter_add_(1, labels[rows].unsqueeze(1), at_labels[rows].unsqueeze(1))
            found[rows] = part
        return found, None
