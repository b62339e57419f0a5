"""The CUDA device: not part of this version."""
