"""What core and worker say to each other, as typed frames over any transport (see `tercet_shared.ipc`)."""
