"""The kernel lab: what a kernel's machine code takes on a TPU that is not there."""
