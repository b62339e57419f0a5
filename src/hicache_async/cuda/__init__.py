"""Devices that run by themselves, their events awaited on a loop. Nothing outside this folder imports it."""

from .device import CudaDevice
from .events import EventBridge

__all__ = ["CudaDevice", "EventBridge"]
