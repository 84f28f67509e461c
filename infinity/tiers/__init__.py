"""The tiers: copies of chunks on the device, in host memory and on NVMe, and the moves between them.

Knows chunks, records and lanes. Callers decide which chunk moves. Must not know modules, autograd or when a step begins.
"""
