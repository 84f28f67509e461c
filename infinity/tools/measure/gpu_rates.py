"""Rates of a GPU's processors and memory, measured for so long that the clock settles.

Knows operations of torch. Must not know links, or the use of the numbers.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from infinity.errors import SwapError

TOKENS, SIZES = 8192, (4096, 14336)  # of products: tokens, and the narrow and the wide side of a layer
ATTENTION = (4, 32, 4096, 128)  # batch, heads, length, size of a head
MEMORY_NBYTES = 256 << 20
SUSTAINED_S = 1.0  # a GPU's clock falls within the first tenths of a second


def product_rate(device: torch.device) -> float:
    """Floating-point operations per second in matrix products of usual shapes."""
    tokens, (narrow, wide) = TOKENS, SIZES
    x, up, down = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in ((tokens, narrow), (narrow, wide), (wide, narrow)))

    def layer():
        hidden = x @ up
        back = hidden @ down
        return hidden, back, back @ down.T, x.T @ hidden

    inner = layer()[0]
    expected = x[:1].float() @ up.float()
    if not torch.allclose(inner[:1].float(), expected, rtol=0.02, atol=0.02 * expected.abs().max().item()):
        raise SwapError(errno.EIO, "a product is wrong: do not train on this machine before you know the reason", str(device))
    return 4 * 2 * tokens * narrow * wide / _sustained_seconds(layer, device)


def attention_rate(device: torch.device) -> float:
    """Floating-point operations per second of causal attention on a GPU, forward and backward. As in PyTorch's counter, they count as if
    attention were not causal."""
    q, k, v = (torch.randn(ATTENTION, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def step():
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops() / _sustained_seconds(step, device)


def memory_rate(device: torch.device) -> float:
    """Bytes per second that a GPU reads and writes in an operation on each element."""
    source, other = (torch.ones(MEMORY_NBYTES // 2, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 3 * source.nbytes / _sustained_seconds(lambda: source + other, device)


def _sustained_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of `work` in the second half of about SUSTAINED_S of it."""
    work()
    wait_for(device)
    begin, halves = time.perf_counter(), []
    for _ in range(2):
        start, num = time.perf_counter(), 0
        while not num or time.perf_counter() - begin < SUSTAINED_S * (len(halves) + 1) / 2:
            for _ in range(4):
                work()
            num += 4
            wait_for(device)
        halves.append((time.perf_counter() - start) / num)
    return halves[-1]


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
