"""Access to parameters and states between steps: reading, writing, gathering and saving.

Knows whether a step is running. Must not know how a step is planned.
"""
