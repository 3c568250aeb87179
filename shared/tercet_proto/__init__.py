"""Generated gRPC code (see proto/)."""
