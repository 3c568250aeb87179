"""``tercet completion``: what makes shells complete the command."""
