"""Training states as files: what a checkpoint says, how it is written whole and read with doubt, and other tools' formats.

Knows files and an engine's values by name. Must not know tiers or when a step begins. From the ground up:

    what it says      json_text, encoding, manifest, manifest_check (which trusts nothing)
    how it lies       files (directories, old or new), writer, reader
    of an engine      contents; areas, linked, publish, save; latest, load
    other formats     safetensors (which trusts nothing, either), safetensors_writer, load_safetensors, dcp_names, dcp_save, dcp_load
    without engines   convert
"""
