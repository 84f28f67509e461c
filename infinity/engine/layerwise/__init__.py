"""Layer-wise accumulation (`infinity.accumulate`): each layer runs all micro-batches of a step before the next layer begins.

Knows modules, steps and saved tensors. Must not know how bytes move.
"""
