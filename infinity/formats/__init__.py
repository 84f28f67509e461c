"""How values are stored: the segments of a record, their dtypes and codecs, and the dtypes of weights and gradients on the device.

Knows dtypes and bytes. Must not know chunks, tiers, ranks or steps.
"""
