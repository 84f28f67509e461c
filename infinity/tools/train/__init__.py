"""The `train` command, with the status of a run and the folder of checkpoints. Uses the engine as any program would."""
