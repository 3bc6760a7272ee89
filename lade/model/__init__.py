"""The tensor side: which models can be served, attention masks, the KV cache, and running the model."""
