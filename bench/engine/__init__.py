"""Benchmarks of the engines: sampling, growing contexts, publications, and what SGLang reports."""
