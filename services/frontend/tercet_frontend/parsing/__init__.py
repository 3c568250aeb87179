"""What the model's text means: content, reasoning, tool calls. One state machine for streamed answers and whole."""
