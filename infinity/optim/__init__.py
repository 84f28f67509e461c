"""The arithmetic of an update, one shard at a time, and the torch.optim.Optimizers of a program.

Knows flat tensors and hyper-parameters. Must not know chunks, tiers or the place of a shard.
"""
