"""Estimate what a run needs before it starts: memory by part, floating-point operations, and time;
refuse a run that does not fit.
"""
