"""The core's side of the links to its workers: plans out, results in."""
