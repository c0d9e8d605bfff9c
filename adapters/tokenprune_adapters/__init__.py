"""Built-in model families, one file per family. Every public module here is a plugin."""
