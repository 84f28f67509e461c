"""Engines: construction, hooks in a model, training steps, and access to parameters between steps.

Knows the methods of the tiers. Must not know how bytes move or what a kernel computes.
"""
