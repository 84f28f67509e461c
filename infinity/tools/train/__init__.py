"""The `train` command, its run's status and its folder of checkpoints. Uses the engine as any program would."""
