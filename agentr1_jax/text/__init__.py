"""Text and token ids: tokenizer adapters, append-only chat rendering, tool-call formats."""
