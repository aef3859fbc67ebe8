"""Tiers of memory for training state: host memory, streamed through the device in pieces, and files on NVMe."""
