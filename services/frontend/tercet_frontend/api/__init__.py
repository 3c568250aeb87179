"""The endpoints: one file each, and what they share."""
