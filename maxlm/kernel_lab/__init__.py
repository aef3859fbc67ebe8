"""The kernel lab: cycles, memory traffic and time of kernels, from their machine code ahead of time or measured on the chip."""
