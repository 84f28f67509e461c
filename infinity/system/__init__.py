"""What an engine has from the machine: threads, memory, ranks, files on drives, clocks.

Knows bytes, threads, paths and processes. Must not know parameters, chunks or why anything is moved.
"""
