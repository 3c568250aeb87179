"""What every service of Tercet shares: wire types, rings, registry, checkpoints, configuration."""
