"""The core's side of the engine streams: what front ends ask, and the frames that they are sent."""
