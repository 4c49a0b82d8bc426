"""Load environments of other libraries, by `library:name`: each is a class with `reset` and
`step`.
"""
