"""The Triton kernels, one a file, with what launches them; imported only where they run."""
