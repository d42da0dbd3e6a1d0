"""The dialects, one file each: how a family of models writes reasoning and tool calls."""
