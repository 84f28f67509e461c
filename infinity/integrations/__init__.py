"""Other libraries that train: their trainers over a model that is in an engine. Each is imported when it is asked for.

Knows `infinity` as any program does, and what one library calls, a module a library. Must not know how an engine works; nothing of
`infinity` knows these.
"""
