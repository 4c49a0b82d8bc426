"""Sockets between the learner and its peers: channels, authentication, access, limits."""
