"""Tables, pictures and the HTML page."""
