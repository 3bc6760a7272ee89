"""An HTTP server on the engine, which speaks as OpenAI's does, and its chat page."""
