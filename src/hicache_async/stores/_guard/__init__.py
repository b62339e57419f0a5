"""The parts of GuardedStore."""
