"""Serve runs as pages that follow them while they go on, to this machine alone (`mage view`)."""
