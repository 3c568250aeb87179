"""How the families of models write tool calls: one small class each, behind one interface."""
