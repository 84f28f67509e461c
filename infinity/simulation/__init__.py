"""A simulated machine on which the engine itself runs: threads, a clock, drives and ranks, and host memory without bytes.

Knows the interfaces of system/ and the operations of torch. Must not know chunks or tiers: the engine that runs on it is the real one.
"""
