"""Devices that run by themselves: their events awaited on a loop. Nothing outside this folder imports it."""
