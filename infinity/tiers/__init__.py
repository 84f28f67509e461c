"""Where each copy of a chunk is, on the device, in host memory or on NVMe, and its moves from one to another.

Knows chunks, records and lanes; moves what it is told to move. Must not know modules, autograd or when a step begins.
"""
