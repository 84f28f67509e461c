"""Training states as files: the content of a checkpoint, its writing as a whole, its reading with doubt, and formats of other tools.

Knows files, and the state of an engine by the door infinity/engine/access/training_state.py. Must not know tiers or when a step begins.
From the ground up:

    content           json_text, encoding, manifest, manifest_check (which trusts no byte)
    files             files (directories, old or new), writer, reader
    of an engine      contents; linked, publish, save; latest, load
    other formats     safetensors_format, safetensors (which trusts no byte), safetensors_writer, load_safetensors; dcp_names, dcp_save,
                      dcp_load
    without engines   convert
"""
