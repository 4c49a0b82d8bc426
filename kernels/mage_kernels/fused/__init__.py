"""Implement and launch the Triton kernels; imported only where they run."""
