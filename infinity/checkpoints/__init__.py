"""Training states as files: what a checkpoint says, how it is written whole and read with doubt, and other tools' formats.

Knows files and an engine's values by name. Must not know tiers or when a step begins.
"""
