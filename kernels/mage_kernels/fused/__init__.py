"""Implement and launch the Triton kernels; imported only if they are used."""
