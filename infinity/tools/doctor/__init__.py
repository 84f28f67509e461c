"""The `doctor` command: checks whether this machine can train. Functions that read the machine and functions that interpret are separate."""
