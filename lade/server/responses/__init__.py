"""`/v1/responses`: OpenAI's API of items and events, without what would have to be kept between requests."""
