"""The `plan` command: predicts the time and memory of a step on any machine. Simulates the engine's own plans on a virtual clock."""
