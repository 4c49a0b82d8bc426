"""The Triton kernels, one a file, and what launches them. Imported only where Triton is
installed.
"""
