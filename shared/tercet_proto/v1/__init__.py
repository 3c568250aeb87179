"""Generated code of the tercet.v1 package."""
