"""Returns from rewards (`returns.py`), and the turns of a batch as columns (`turn_table.py`)."""
