"""The life of one training step: its forward passes, backward passes, gradients, updates, and the calls that the engine refuses.

Knows chunks, gradients and the plan. Must not know hooks of modules, or how bytes move.
"""
