"""What is done to a user's modules and parameters, and what these are to the program while their values are elsewhere.

Knows torch.nn. Must not know chunks, tiers or steps: an engine is whoever owns a parameter.
"""
