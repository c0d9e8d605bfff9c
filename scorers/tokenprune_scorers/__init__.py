"""Built-in signals, one file per idea. Every public module here is a plugin."""
