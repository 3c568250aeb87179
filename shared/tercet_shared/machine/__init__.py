"""What this machine has, and what the control groups above a process leave of it."""
