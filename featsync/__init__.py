"""featsync."""
