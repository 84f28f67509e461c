"""What a step will take on a machine, before it is bought: the `plan` command. Plays the engine's own plans by a virtual clock."""
