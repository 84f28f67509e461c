"""Integrations with other libraries: trainers that drive a model in an engine. One module per library, imported by the program.

Knows the public names of `infinity`, and the calls of one library. Must not know how an engine works. No other package imports this one.
"""
