"""Decoding by several processes: a leader and its followers, tensor parallelism, lookahead parallelism."""
