"""The `doctor` command: this machine as a place to train. What looks and what interprets are two things."""
