"""The parts of TieredStore."""
