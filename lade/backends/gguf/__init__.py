"""GGUF files: models as laptops have them, with the weights that the file holds."""
