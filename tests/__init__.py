"""The tests; helpers that several modules share are imported as ``tests.folder.module``."""
