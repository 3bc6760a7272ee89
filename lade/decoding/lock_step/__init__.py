"""Rows that emit their tokens together, one each at a time, though each looks ahead as far as it can."""
