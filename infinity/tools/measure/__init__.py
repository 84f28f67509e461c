"""What links, processors and drives give: the `bench`, `calibrate` and `trace` commands. Moves real bytes, and compares them."""
