"""The `bench`, `calibrate` and `trace` commands: measure links, processors and drives. The probes move real bytes and compare them."""
