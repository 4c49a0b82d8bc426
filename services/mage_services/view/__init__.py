"""`mage view`: runs as pages that follow them while they go on, served to this machine alone."""
