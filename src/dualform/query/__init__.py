"""Questions: attention, contributions, masks. Everything is streamed chunk by chunk."""
