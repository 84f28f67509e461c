"""What people run beside an engine: the commands, and what plans, measures, watches and examines.

The engine knows nothing of it. cli.py, one floor above, spells the options of the commands here.
"""
