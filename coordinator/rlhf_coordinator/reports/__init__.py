"""What a run leaves behind for people: metrics, events, a timeline, pictures, a summary."""
