"""The commands of `infinity`: training, predictions, measurements, status of runs, checks of a machine.

The engine does not import this package. cli.py defines the options of the commands.
"""
