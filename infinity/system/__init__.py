"""The machine's services for an engine: threads, memory, ranks, files on drives, clocks.

Knows bytes, threads, paths and processes. Must not know parameters, chunks or the reason of a transfer.
"""
