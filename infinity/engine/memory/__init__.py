"""Device memory during training: the room beside activations, its division, and advice about layer-wise accumulation.

Knows spans, budgets and measured step times. Must not know modules or autograd.
"""
