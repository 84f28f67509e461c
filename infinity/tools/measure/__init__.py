"""What links, processors and drives give: the `bench`, `tune` and `trace` commands. Moves real bytes, and compares them."""
