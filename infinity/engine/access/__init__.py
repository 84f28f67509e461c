"""Access to parameters and states from outside of a step: reading, writing, gathering and saving them.

Knows when a step is running. Must not know how a step is planned.
"""
