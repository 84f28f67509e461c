"""Code that PyTorch calls during forward and backward passes: module hooks, saved-tensor hooks, gradient hooks, compiled modules.

Knows modules, autograd, and the step cycle that hooks report to. Must not know how a step is planned, or how bytes move.
"""
