"""Changes to a user's modules and parameters, and the behaviour of parameters whose values are elsewhere.

Knows torch.nn. Must not know chunks, tiers or steps: an engine is the owner of a parameter.
"""
