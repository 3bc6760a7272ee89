"""Where guesses come from: one drafter per method."""
