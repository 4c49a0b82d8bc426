"""Research methods that change a run through one interface: `mage_async/methods/method.py`."""
