"""Decoding by several processes: a leader and followers, tensor parallelism, lookahead parallelism."""
