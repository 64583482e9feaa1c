"""Triton kernels for CUDA devices, each beside the torch version that it must equal. Importing them needs no GPU."""
