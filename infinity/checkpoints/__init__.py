"""Checkpoints: content, atomic writing, checked reading, and the file formats of other tools.

Knows files, and the state of an engine through infinity/engine/access/training_state.py. Must not know tiers or when a step begins.
Modules, lowest layer first:

    content           json_text, encoding, manifest, manifest_check (which trusts no byte)
    files             files (directories, atomic replacement), writer, reader
    of an engine      contents; linked, publish, save; latest, load
    other formats     safetensors_format, safetensors (which trusts no byte), safetensors_writer, load_safetensors; dcp_names, dcp_save,
                      dcp_load
    without engines   convert
"""
