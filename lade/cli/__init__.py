"""The shell: `lade generate`, `lade chat`, `lade info`, `lade demo`; none imports torch before it runs."""
