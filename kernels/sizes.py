"""Bytes that `tables` takes of the device, readable without torch."""

BYTES_PER_DEVICE_SLOT = 4  # stamp, in each domain
SCRATCH_BYTES_PER_LOGICAL_SLOT = 4 + 1  # marks, roles; shared by all domains of a rank
