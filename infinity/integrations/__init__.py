"""Integrations with other libraries: their trainers drive a model that is in an engine. One module a library, imported by the program.

Knows the public names of `infinity`, and the calls of one library. Must not know how an engine works. No other package imports this one.
"""
