"""What the worker tells of itself: its numbers, and spans of traced requests and steps."""
