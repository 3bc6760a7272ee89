"""Resolution and loading of models for the shell."""
