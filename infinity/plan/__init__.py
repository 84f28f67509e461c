"""Decides where data lies and in which order data moves, from sizes and sequences alone.

Knows names, numbers and budgets. Must not know torch, threads or files: the owner of a plan carries it out.
"""
