"""Load or build the policy as a model, warm-start it, checkpoint it, and copy it for
publication.
"""
