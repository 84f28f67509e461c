"""What PyTorch calls during a forward or a backward pass: module hooks, saved-tensor hooks, gradient hooks, compiled modules.

Knows modules, autograd, and the steps that it tells about them. Must not know how a step is planned, or how bytes move.
"""
