"""The arithmetic of an update, one shard at a time, and the torch.optim.Optimizers that a program sees of it.

Knows flat tensors and hyper-parameters. Must not know chunks, tiers or where a shard lies.
"""
