"""Decoding by several processes: the first one leads, the others make the same passes."""
