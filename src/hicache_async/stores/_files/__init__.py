"""The parts of FileStore: objects, their directory, limits and lookups."""
