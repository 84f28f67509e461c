"""Device memory during training: how much is left beside activations, what else is kept there, and advice about it.

Knows spans, budgets and the step times that are measured. Must not know modules or autograd.
"""
