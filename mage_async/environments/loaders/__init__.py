"""Load environments of other libraries, by `library:name`: each loader returns a class with `reset`
and `step`.
"""
