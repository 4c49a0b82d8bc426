"""The Triton kernels and their launches; imported only where they run."""
