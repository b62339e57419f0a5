"""The parts of ShmStore and MmapStore: a segment of slots, its table, and the store over it."""
