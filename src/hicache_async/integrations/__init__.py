"""Bridges to other systems; what one needs is an extra of its own."""
