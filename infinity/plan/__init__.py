"""What lies where, and in which order it moves: decided from sizes and sequences alone.

Knows names, numbers and budgets. Must not know torch, threads or files: whoever has a plan carries it out.
"""
