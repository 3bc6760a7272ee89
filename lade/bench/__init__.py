"""What speed is measured with: models of any size that write sensible text."""

from lade.bench.inflate import inflate

__all__ = ["inflate"]
