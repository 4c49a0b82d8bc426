"""Run on a Ray cluster: place processes on nodes, send them files, examine the nodes."""
