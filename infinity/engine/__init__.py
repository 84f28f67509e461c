"""What is to happen when: an engine's making, its hooks in a model, its steps.

Knows the tiers by their verbs. Must not know how bytes move or what a kernel computes.
"""
