"""An OpenAI-compatible server over `lade.Engine`; what `lade serve` runs."""
