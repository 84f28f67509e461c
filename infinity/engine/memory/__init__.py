"""Device memory during training: the memory beside activations, the division of this memory, and advice about layer-wise accumulation.

Knows spans, budgets and measured step times. Must not know modules or autograd.
"""
